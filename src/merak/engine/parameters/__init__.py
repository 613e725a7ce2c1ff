"""Parameters of a model in parts, by name: read whole, written and averaged in every layout."""
