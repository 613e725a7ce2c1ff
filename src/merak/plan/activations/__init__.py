"""Activations: which are saved, recomputed or offloaded, so that each stage fits its device."""
