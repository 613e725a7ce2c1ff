"""Operators that Merak adds to torch: collectives with gradients, sharded losses and dropout."""
