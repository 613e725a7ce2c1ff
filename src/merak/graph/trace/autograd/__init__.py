"""Gradients that a model takes inside its forward, written out as operators."""
