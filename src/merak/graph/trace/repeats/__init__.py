"""Repeated blocks in a trace: a block that equals one before it is copied, and does not run."""
