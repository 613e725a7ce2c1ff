"""Segments for a sub-microbatch, cut at their all-reduces."""
