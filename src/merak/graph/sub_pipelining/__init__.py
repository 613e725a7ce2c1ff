"""Segments for half a microbatch, cut at their all-reduces."""
