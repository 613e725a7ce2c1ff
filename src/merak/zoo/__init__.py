"""Models of transformers' architectures by name: small versions of them, and batches for them."""
