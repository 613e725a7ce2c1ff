"""What each rank reads: its own batches, and of these only the columns its segments use."""

from merak.data.columns import check_columns, check_not_empty
from merak.data.loader import example_batch, shard_loader
from merak.data.non_tensors import split_plain, without_plain
from merak.data.signature import BatchSignature, signature, union

__all__ = [
    "BatchSignature",
    "check_columns",
    "check_not_empty",
    "example_batch",
    "shard_loader",
    "signature",
    "split_plain",
    "union",
    "without_plain",
]
