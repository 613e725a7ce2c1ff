"""Batch signatures: shapes and types of the columns, for ranks that read no data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from merak.core.errors import DataError
from merak.core.storages import is_dense
from merak.core.tensor_meta import TensorMeta


@dataclass(frozen=True, slots=True)
class BatchSignature:
    """Shapes and element types of a microbatch's columns; hashable, small to send.

    Args:
        columns: (name, shape and element type), sorted by name; empty where there is no microbatch.
    """

    columns: tuple[tuple[str, TensorMeta], ...]

    def __getitem__(self, column: str) -> TensorMeta:
        """The shape and element type of one column."""
        return dict(self.columns)[column]

    def __bool__(self) -> bool:
        """Whether there is a microbatch at all."""
        return bool(self.columns)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns, sorted."""
        return tuple(name for name, _ in self.columns)


def signature(batch: Mapping[str, Any]) -> BatchSignature:
    """The signature of a batch.

    Args:
        batch: tensors by column; may be empty.

    Raises:
        DataError: a column that is not a tensor.
    """
    check_tensors(batch)
    return BatchSignature(
        tuple(
            (name, TensorMeta(tuple(batch[name].shape), batch[name].dtype))
            for name in sorted(batch)
        )
    )


def check_tensors(batch: Mapping[str, Any]) -> None:
    """Refuse a column that is not a tensor, such as a list of images or an object of a library.

    Args:
        batch: columns by name.

    Raises:
        DataError: there is one.
    """
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor):
            raise DataError(
                f"column {name!r} of the batch is a {type(value).__name__}, not a tensor; give a "
                "data_collator that makes tensors (torch.stack, or pad_sequence and a mask where "
                "sizes differ), or remove the column."
            )
        if not is_dense(value):
            raise DataError(
                f"column {name!r} of the batch is a tensor of layout {value.layout}, whose "
                "elements have no fixed places to cut and send; give its indices and values, or "
                "to_dense(), as columns."
            )


def union(*signatures: BatchSignature) -> BatchSignature:
    """The signature of the whole microbatch, from ranks that each read some of its columns.

    Raises:
        DataError: ranks disagree on the shape or type of a column.
    """
    columns: dict[str, TensorMeta] = {}
    for name, meta in (column for each in signatures for column in each.columns):
        if columns.setdefault(name, meta) != meta:
            raise DataError(
                f"ranks read column {name!r} of the same microbatch as {columns[name].shape} "
                f"{columns[name].dtype} and as {meta.shape} {meta.dtype}; make the dataset and the "
                "data_collator give the same result on every rank."
            )
    return BatchSignature(tuple(sorted(columns.items(), key=lambda column: column[0])))
