"""Foundations of all folders: errors, the mesh of ranks, health, random state, tensor metadata."""
