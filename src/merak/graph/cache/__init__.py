"""The trace cache: fingerprints of models and traces stored as JSON and tensors."""
