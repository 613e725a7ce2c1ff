"""Checkpoints: sharded ones to resume from in any layout, and Hugging Face folders."""
