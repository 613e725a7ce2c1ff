"""Joint graphs: forward and backward of a segment as one graph, and the functions that run it."""
