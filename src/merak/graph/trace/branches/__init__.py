"""Branches that a random draw or the host decides on, merged into one graph."""
