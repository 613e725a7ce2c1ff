"""Sequence parallelism: activations sharded between tensor parallel blocks."""
