"""The trace: from a model and a batch's shapes to one graph of ATen operators."""
