"""Opaque modules that multiply rows in groups, as experts do, in the graph as one product."""
