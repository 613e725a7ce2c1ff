"""Segments: the traced graph, cut where few values are alive."""
