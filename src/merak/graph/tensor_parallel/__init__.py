"""Tensor parallelism: how weights are sharded over ranks, and every rank's rewritten graph."""
