"""Data loading of a rank: its own batches, and only the columns that its segments read."""

from merak.data.columns import check_columns, check_not_empty
from merak.data.loader import example_batch, shard_loader
from merak.data.longest import longest_batch
from merak.data.non_tensors import drop_non_tensors, split_non_tensors
from merak.data.signature import BatchSignature, agreed, check_tensors, signature, signatures, union

__all__ = [
    "BatchSignature",
    "agreed",
    "check_columns",
    "check_not_empty",
    "check_tensors",
    "drop_non_tensors",
    "example_batch",
    "longest_batch",
    "shard_loader",
    "signature",
    "signatures",
    "split_non_tensors",
    "union",
]
