"""Relative differences between the tensors of a run on ranks and of one in a single process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from merak.check.runs import Outcome, Tensors
from merak.core.shards import join

TOLERANCE = 1e-5
"""The most that fp32 may differ, relative to the largest magnitude of a tensor."""

EXACT = 1e-9
"""Relative difference in float64 that always counts as rounding."""

VANISHING = 1e-6
"""Fraction of a float32 difference that float64 may leave: rounding leaves 2e-9, a mistake all."""

OF_KERNELS = 100.0
"""How many times more rounding some kernels may leave than others that compute the same."""

SMALLEST = 1e-3
"""Tensors this much smaller than the largest one of the model are held to its scale instead.

Some gradients are zero but for rounding (a key's bias shifts all scores of a query alike), and
what is left of them is the rounding of much larger summands.
"""

NEXT_TO_NOTHING = 1e-6
"""Outputs this much smaller than the largest one of the model are held to its scale instead."""

MASK = 1e30
"""Numbers this large say that a place does not count."""

Distances = dict[str, float]
"""By name of a tensor, how far it is off relative to its largest magnitude."""


class Disagreement(Exception):
    """Difference between ranks that must hold equal tensors; the message says which."""


def whole(ranks: Sequence[Outcome], kind: str) -> Tensors:
    """Join the tensors of all ranks to those of the whole model.

    Args:
        ranks: what every rank saw.
        kind: the field of `Outcome`.

    Raises:
        Disagreement: copies of a tensor on two ranks are not equal to the last bit.
    """
    found: Tensors = {}
    groups: dict[tuple[int, int], list[Outcome]] = {}
    for rank in sorted(ranks, key=lambda r: r.place[1]):
        groups.setdefault((rank.place[0], rank.place[2]), []).append(rank)
    for own in groups.values():
        for name in dict.fromkeys(name for rank in own for name in getattr(rank, kind)):
            value = _joined([getattr(rank, kind).get(name) for rank in own], own[0], name)
            if value is None:
                continue
            known = found.setdefault(name, value)
            if not _same(known, value):
                raise Disagreement(f"ranks hold different copies of {name}.")
    return found


def _joined(shards: list[torch.Tensor | None], first: Outcome, name: str) -> torch.Tensor | None:
    """A tensor of which ranks hold shards or copies; None where the one that has it all has none.

    Raises:
        Disagreement: copies differ, or some ranks have one and others have none.
    """
    shard = first.shards.get(name)
    if shard is not None and shard.owner is not None:
        return shards[shard.owner]
    found = [own for own in shards if own is not None]
    if len(found) < len(shards):
        raise Disagreement(f"some ranks have no {name}, which others have.")
    if shard is not None:
        if any(not _same(own, found[i - i % shard.copies]) for i, own in enumerate(found)):
            raise Disagreement(f"ranks hold different copies of a shard of {name}.")
        return join(found, shard)
    if any(not _same(found[0], other) for other in found[1:]):
        raise Disagreement(f"ranks hold different copies of {name}.")
    return found[0]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def distances(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> Distances:
    """Relative distance of each tensor from the expected one; a missing one counts as zero."""
    largest = max((_size(t) for t in expected.values()), default=0.0)
    off: Distances = {}
    for name in dict.fromkeys((*expected, *found)):
        mine, right = found.get(name), expected.get(name)
        scale = max(0.0 if right is None else _size(right), SMALLEST * largest)
        off[name] = _distance(mine, right, scale)
    return off


def _distance(mine: torch.Tensor | None, right: torch.Tensor | None, scale: float) -> float:
    if mine is None and right is None:
        return 0.0
    if mine is None or right is None:
        apart = _size(right if mine is None else mine)  # type: ignore[arg-type]
    else:
        apart = _size(mine.double() - right.double())
    if apart == 0.0:
        return 0.0
    return apart / scale if scale else float("inf")


def output_distances(found: Tensors, expected: Tensors) -> Distances:
    """Relative distance of each output from the expected one; a missing one counts as zero.

    Elements that hold the same number, infinite ones and those that stand for a mask included, have
    no distance.
    """
    names = tuple(dict.fromkeys((*expected, *found)))
    sizes = {name: _shown_size(expected[name]) for name in expected}
    largest = max(sizes.values(), default=0.0)
    off: Distances = {}
    for name in names:
        mine, right = found.get(name), expected.get(name)
        if mine is None or right is None or mine.shape != right.shape:
            off[name] = 1.0
            continue
        scale = max(sizes[name], NEXT_TO_NOTHING * largest)
        apart = apart_by(mine, right)
        off[name] = 0.0 if apart == 0.0 else apart / scale if scale else float("inf")
    return off


def apart_by(mine: torch.Tensor, right: torch.Tensor) -> float:
    """Return the largest magnitude of a difference; numbers that are not alike."""
    mine, right = as_real(mine), as_real(right)
    is_same = (mine == right) | (mine.isnan() & right.isnan())
    return _size(torch.where(is_same, torch.zeros_like(mine), mine - right))


def _shown_size(tensor: torch.Tensor) -> float:
    """Return the largest magnitude of the numbers that do not stand for a mask."""
    sizes = as_real(tensor).abs()
    return _size(sizes[sizes < MASK])


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a tensor in float64, complex ones as pairs."""
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return tensor.double()


def _size(tensor: torch.Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def exact_tolerance(rounding: float) -> float:
    """Tolerance in float64 where the difference in float32 is to be rounding alone.

    Args:
        rounding: the largest difference in float32, relative to magnitudes; it may not be finite.
    """
    return max(EXACT, VANISHING * min(rounding, 1.0)) if math.isfinite(rounding) else EXACT


def loss_difference(found: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest relative difference between two lists of losses."""
    return max(
        (abs(a - b) / max(abs(b), 1e-12) for a, b in zip(found, expected, strict=True)),
        default=0.0,
    )
