"""Segments run: forward, recomputation and backward, whole or as sub-microbatches."""
