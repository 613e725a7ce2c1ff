"""The search for the placements of all weights that cost least."""
