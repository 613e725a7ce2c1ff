"""Search for the cheapest placements of all weights."""
