"""Running segments: forward, recomputation and backward, whole or as sub-microbatches."""
