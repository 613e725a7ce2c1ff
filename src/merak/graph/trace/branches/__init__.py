"""Branches on random numbers or on the batch alone, merged into one graph."""
