"""Trainings that a package's own trainer does: TRL's, and sentence-transformers'."""
