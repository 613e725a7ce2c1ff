"""Programs: the segments of a rank compiled to functions."""
