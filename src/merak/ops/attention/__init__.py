"""Attention that torch has no operator for: inside documents, and over ranks in a ring."""
