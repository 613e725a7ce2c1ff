"""Checkpoints on storage that fsspec knows.

Such storage has no rename, so a checkpoint is there as long as its manifest is, which is written
last and removed first. Each rank uploads what it has written. A host that reads a checkpoint has a
folder with its small files; those of tensors are fetched when a rank opens them.
"""
