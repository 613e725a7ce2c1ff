"""Checkpoints in formats of others: of transformers' own Trainer, and of Merak before this one."""
