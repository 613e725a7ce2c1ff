"""Digests of the samples that a rank reads, by which ranks of one replica tell theirs apart.

The ranks of a replica (its pipeline, tensor and context parallel ranks) each load the columns that
they read. Where a dataset is in another order on one of them, the model would get the inputs of one
sample and the labels of another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import send_to_device  # type: ignore[import-untyped]

MAX_ELEMENTS = 1 << 14
"""Elements of a column that its digest is of, evenly spaced, so that images cost no time."""

INDICES = "the sampler's indices"
"""Name of the digest of a batch's indices in its dataset, beside those of columns."""


@dataclass(frozen=True, slots=True)
class SampleDigests:
    """Digests of a microbatch's samples on one rank.

    Args:
        digests: by column, also of columns that this rank does not need; and by `INDICES`.
        reads: the columns that this rank needs.
    """

    digests: Mapping[str, int] = field(default_factory=dict)
    reads: frozenset[str] = frozenset()


class DigestedBatch(dict[str, Any]):
    """A batch's columns with the digests of its samples, as a rank's loader gives it.

    Args:
        columns: tensors by column.
        samples: the digests; None where who makes it anew does not know them.
    """

    def __init__(self, columns: Mapping[str, Any], samples: SampleDigests | None = None) -> None:
        super().__init__(columns)
        self.samples = samples

    def to(self, device: Any, non_blocking: bool = False) -> DigestedBatch:
        """The batch on a device, as accelerate's loaders ask for it."""
        moved = send_to_device(dict(self), device, non_blocking=non_blocking)
        return DigestedBatch(moved, self.samples)

    def __reduce__(self) -> tuple[Any, ...]:
        return DigestedBatch, (dict(self), self.samples)


def digests_of(batch: Mapping[str, Any]) -> SampleDigests:
    """The digests that a loader gave with a batch; without any, those of its columns."""
    known = getattr(batch, "samples", None)
    return known if isinstance(known, SampleDigests) else digest_columns(batch, batch)


def digest_columns(batch: Mapping[str, Any], reads: Iterable[str]) -> SampleDigests:
    """Digests of a batch's tensors.

    Args:
        batch: tensors by column; other values are left out.
        reads: the columns that this rank needs.
    """
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    return SampleDigests({name: digest(t) for name, t in tensors.items()}, frozenset(reads))


def digest(value: Any) -> int:
    """A number that tensors, or indices, have in common with equal ones alone, as good as surely.

    Args:
        value: a tensor on the CPU, of which some elements count; a tensor elsewhere counts by its
            shape. Any other value counts by its text.
    """
    made = hashlib.blake2b(digest_size=8)
    if isinstance(value, torch.Tensor):
        made.update(repr((tuple(value.shape), value.dtype)).encode())
        if value.device.type == "cpu" and value.layout is torch.strided and value.numel():
            made.update(_some_elements(value))
    else:
        made.update(repr(value).encode())
    return int.from_bytes(made.digest(), "big")


def _some_elements(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().reshape(-1)
    chosen = flat[:: max(1, flat.numel() // MAX_ELEMENTS)].contiguous()
    return bytes(chosen.resolve_conj().resolve_neg().view(torch.uint8).numpy().tobytes())


def differing(one: SampleDigests, other: SampleDigests) -> list[str]:
    """Names of what two ranks of a replica have read differently; empty where that does not matter.

    It matters if each of the two needs something that is another on the other: then what they
    compute with is of different samples. An image that each rank crops in its own way does not
    matter where the other one needs the label alone.

    Args:
        one: of one rank.
        other: of another.
    """
    mine, theirs = one.digests, other.digests
    names = [name for name in mine if name in theirs and mine[name] != theirs[name]]
    if INDICES in names:
        return [INDICES]
    if one.reads.isdisjoint(names) or other.reads.isdisjoint(names):
        return []
    return [name for name in names if name in one.reads | other.reads]
