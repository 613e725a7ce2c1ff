"""Searches for hyperparameters whose trials all ranks of a job train together."""
