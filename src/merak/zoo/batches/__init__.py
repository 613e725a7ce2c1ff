"""Batches that fit a model: from its config, its documentation and what its forward asks for."""
