"""Tied parameters: the segments that read each, and the pp ranks that hold a copy of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Holder:
    """A pp rank that reads a tied parameter.

    Args:
        rank: the pp rank.
        first: the lowest segment there that reads it.
        last: the highest.
        stage: the stage of the lowest.
    """

    rank: int
    first: int
    last: int
    stage: int


@dataclass(frozen=True, slots=True)
class Reader:
    """A segment with its pp rank, its stage, and the parameters it reads."""

    rank: int
    stage: int
    segment: int
    parameters: tuple[str, ...]


def find_holders(readers: Sequence[Reader]) -> dict[str, tuple[Holder, ...]]:
    """Tied parameters, which several segments read: their holders, last reader first."""
    by_name: dict[str, list[Reader]] = {}
    for reader in readers:
        for name in reader.parameters:
            by_name.setdefault(name, []).append(reader)
    return {name: _holders(found) for name, found in by_name.items() if len(found) > 1}


def _holders(readers: Sequence[Reader]) -> tuple[Holder, ...]:
    by_rank: dict[int, list[Reader]] = {}
    for reader in sorted(readers, key=lambda r: r.segment):
        by_rank.setdefault(reader.rank, []).append(reader)
    holders = [
        Holder(rank, own[0].segment, own[-1].segment, own[0].stage) for rank, own in by_rank.items()
    ]
    return tuple(sorted(holders, key=lambda h: h.first, reverse=True))
