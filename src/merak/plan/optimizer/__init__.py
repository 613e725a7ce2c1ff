"""What an optimizer does to shards, judged by its steps on small tensors."""
