"""From a model and a batch's shapes to one graph of ATen operators."""
