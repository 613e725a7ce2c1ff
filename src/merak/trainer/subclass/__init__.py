"""Subclasses of `MerakTrainer`: the methods that they may override, and what these give."""
