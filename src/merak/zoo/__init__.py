"""The models of transformers' architectures: small versions of them, and batches for them."""
