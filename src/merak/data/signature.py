"""Batch signatures: shapes and types of the columns, for ranks that read no data."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from merak.core.errors import DataError
from merak.core.storages import is_dense
from merak.core.tensor_meta import IGNORED_LABEL, TensorMeta, known_masks

_LEAST_DOCUMENTS = 16
"""For which a program has room."""


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


def signature(batch: Mapping[str, Any], *, ends: bool = False) -> BatchSignature:
    """The signature of a batch, with which of its columns are ones, for those on the host.

    Args:
        batch: tensors by column; may be empty.
        ends: whether to look where samples and packed documents end, too, and which labels are
            ignored behind samples.

    Raises:
        DataError: a column that is not a tensor.
    """
    check_tensors(batch)

    def meta(column: torch.Tensor) -> TensorMeta:
        found = TensorMeta(tuple(column.shape), column.dtype)
        if ends and found.may_be_ones and _begins_with(0, column):
            return replace(found, documents=_documents(column))
        if not found.may_be_ones or not _begins_with(1, column):
            return found
        ignored = _ignored(column, batch) if ends else ()
        return replace(found, ones=bool((column == 1).all()), ignored=ignored)

    return BatchSignature(tuple((name, meta(value)) for name, value in sorted(batch.items())))


def signatures(
    batches: Sequence[Mapping[str, Any]], masks: Collection[str] = ()
) -> list[BatchSignature]:
    """The signatures of a training step's microbatches, with where their samples end.

    Args:
        batches: tensors by column, of each microbatch.
        masks: columns whose ones make another program. Of those on an accelerator these are looked
            at, in one read for the whole step, and nothing where there are none.

    Raises:
        DataError: a column that is not a tensor.
    """
    return [signature(batch, ends=True) for batch in _looked_at(batches, masks)]


def _looked_at(
    batches: Sequence[Mapping[str, Any]], masks: Collection[str]
) -> list[dict[str, Any]]:
    """Batches whose masks on an accelerator, and what these may hide, are copies on the host."""
    found = [dict(batch) for batch in batches]
    for batch in found:
        check_tensors(batch)
    wanted = [
        (batch, name)
        for batch in found
        for name, column in batch.items()
        if any(_may_hide(batch.get(mask), column) for mask in masks)
    ]
    if wanted:
        flat = torch.cat([batch[name].flatten().to(torch.int64) for batch, name in wanted]).cpu()
        parts = flat.split([batch[name].numel() for batch, name in wanted])
        for (batch, name), part in zip(wanted, parts, strict=True):
            batch[name] = part.view(batch[name].shape).to(batch[name].dtype)
    return found


def _may_hide(mask: torch.Tensor | None, column: torch.Tensor) -> bool:
    """Whether a column on an accelerator is a mask, or of integers where it says which are read."""
    if mask is None or not _is_away(mask) or mask.device != column.device:
        return False
    metas = (TensorMeta(tuple(one.shape), one.dtype) for one in (mask, column))
    return mask.shape == column.shape and all(meta.may_be_ones for meta in metas)


def _is_away(column: torch.Tensor) -> bool:
    """Whether the host waits for a device where it reads a column."""
    return column.device.type not in ("cpu", "meta")


def _begins_with(value: int, column: torch.Tensor) -> bool:
    """Whether a column does, on the host: elsewhere a look at it would wait."""
    on_host = column.device.type == "cpu" and column.numel() > 0
    return on_host and bool(column[(0,) * column.ndim] == value)


def _documents(positions: torch.Tensor) -> int:
    """Room for the documents of packed rows: 16 or 4 times as many and so on; 0 for other columns.

    Few sizes make few programs, since each has one of its own.
    """
    if positions.ndim != 2:
        return 0
    begins = positions == 0
    goes_on = positions[:, 1:] == positions[:, :-1] + 1
    if not bool(begins[:, 0].all() and (begins[:, 1:] | goes_on).all()):
        return 0
    number, room = int(begins.sum()), _LEAST_DOCUMENTS
    while room < number:
        room *= 4
    return room if number > len(positions) else 0


def _ignored(mask: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """Columns that are ignored behind the ends of samples, if it is a mask that says where."""
    sees, hides = mask == 1, mask == 0
    goes_on = sees[:, 1:] <= sees[:, :-1]
    if mask.ndim != 2 or not (bool((sees | hides).all()) and sees[:, 0].all() and goes_on.all()):
        return ()
    same = {n: c for n, c in batch.items() if c.shape == mask.shape and c.device == mask.device}
    found = (n for n, c in same.items() if bool((sees | (c == IGNORED_LABEL)).all()))
    return tuple(sorted(n for n in found if batch[n] is not mask))


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


def agreed(row: Sequence[BatchSignature], *, may_change: bool) -> tuple[BatchSignature, ...]:
    """Signatures of replicas' microbatches that run together, which know the same of their columns.

    Args:
        row: of each replica; empty where it has no microbatch.
        may_change: whether values may still change, so that none are known.
    """
    if may_change:
        return tuple(BatchSignature(known_masks(found.columns)) for found in row)
    given = [dict(found.columns) for found in row if found]

    def known(name: str, meta: TensorMeta) -> TensorMeta:
        others = [own[name] for own in given if name in own]
        common = set(meta.ignored).intersection(*(other.ignored for other in others))
        ones = all(other.ones for other in others)
        rooms = [other.documents for other in others]
        room = max(rooms) if all(rooms) else 0
        return replace(meta, ones=ones, ignored=tuple(sorted(common)), documents=room)

    return tuple(BatchSignature(tuple((n, known(n, m)) for n, m in f.columns)) for f in row)


def union(*signatures: BatchSignature) -> BatchSignature:
    """The signature of the whole microbatch, from ranks that each read some of its columns.

    Raises:
        DataError: ranks disagree on the shape or type of a column.
    """
    columns: dict[str, TensorMeta] = {}
    for name, meta in (column for each in signatures for column in each.columns):
        known = columns.setdefault(name, meta)
        seen = sorted({*meta.ignored, *known.ignored})  # by ranks that read both columns
        columns[name] = replace(
            meta,
            ones=meta.ones and known.ones,
            ignored=tuple(seen),
            documents=min(meta.documents, known.documents),
        )
        if (known.shape, known.dtype) != (meta.shape, meta.dtype):
            raise DataError(
                f"ranks read column {name!r} of the same microbatch as {known.shape} "
                f"{known.dtype} and as {meta.shape} {meta.dtype}; make the dataset and the "
                "data_collator give the same result on every rank."
            )
    return BatchSignature(tuple(sorted(columns.items(), key=lambda column: column[0])))
