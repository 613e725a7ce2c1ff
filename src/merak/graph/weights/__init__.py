"""Weights: models without weights, deferred initialisation, and who holds which parameter."""
