"""Folders that `from_pretrained` reads: tensors of their files, exchange between ranks, export."""
