"""From a model without weights to a list of segments."""
