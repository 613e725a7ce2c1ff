"""Models without weights: where every parameter's numbers come from."""
