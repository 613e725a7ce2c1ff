"""Optimizers of any class over the tensors of a rank: judged, and connected to the model."""
