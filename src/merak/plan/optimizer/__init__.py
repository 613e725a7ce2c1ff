"""Optimizers on shards, judged by their steps on small tensors."""
