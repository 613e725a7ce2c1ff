"""Modules whose inside cannot be traced: kept whole in the graph, as one operator."""
