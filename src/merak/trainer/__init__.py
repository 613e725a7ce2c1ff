"""`MerakTrainer`: transformers' Trainer on a mesh of ranks."""

from merak.trainer.seq2seq import MerakSeq2SeqTrainer
from merak.trainer.trainer import MerakTrainer

__all__ = ["MerakSeq2SeqTrainer", "MerakTrainer"]
