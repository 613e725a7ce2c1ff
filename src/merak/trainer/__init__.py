"""`MerakTrainer`: transformers' Trainer on a mesh of ranks."""

from merak.trainer.trainer import MerakTrainer

__all__ = ["MerakTrainer"]
