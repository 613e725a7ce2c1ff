"""Checkpoints and models of a training: saved, found again, and resumed from."""
