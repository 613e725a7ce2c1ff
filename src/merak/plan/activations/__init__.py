"""Activation policies: segments save, recompute or offload, so that each rank fits."""
