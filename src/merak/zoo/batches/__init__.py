"""Batches for a model: from its config, its documentation and the errors of its forward."""
