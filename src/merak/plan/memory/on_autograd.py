"""Segments whose backward autograd runs: which, why, and what they hold."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from merak.core.units import ranges, size
from merak.graph.ir.ir import Segment
from merak.plan.cost.segments.memory import SegmentMemory


@dataclass(frozen=True, slots=True)
class OnAutograd:
    """Segments whose backward autograd runs for one reason.

    Args:
        segments: their numbers.
        names: theirs; empty where a segment has none.
        reason: why the backward is no graph.
        saved_bytes: that those which save their activations hold of a microbatch, besides inputs
            and outputs.
    """

    segments: tuple[int, ...]
    names: tuple[str, ...]
    reason: str
    saved_bytes: int

    def __str__(self) -> str:
        """A sentence for people."""
        first = self.names[0] and f" ({self.names[0]}{' …' if len(self.names) > 1 else ''})"
        several = "s" if len(self.segments) > 1 else ""
        held = f"{size(self.saved_bytes)} saved" if self.saved_bytes else "no activations saved"
        return (
            f"autograd runs the backward of segment{several} {ranges(list(self.segments))}{first}, "
            f"since {self.reason}: {held} a microbatch, recomputed whole or not at all, not "
            "offloaded, and with every gradient computed at once"
        )


def on_autograd(
    segments: Iterable[Segment], memory: Mapping[int, SegmentMemory], saved: Container[int]
) -> tuple[OnAutograd, ...]:
    """Segments whose backward autograd runs, by reason.

    Args:
        segments: those that train.
        memory: by the number of a segment.
        saved: numbers of the segments that save their activations.
    """
    by_reason: dict[str, list[Segment]] = {}
    for segment in segments:
        if segment.index in memory and (reason := memory[segment.index].obstacle):
            by_reason.setdefault(reason, []).append(segment)
    return tuple(
        OnAutograd(
            tuple(own.index for own in found),
            tuple(own.name for own in found),
            reason,
            sum(memory[own.index].saved_bytes for own in found if own.index in saved),
        )
        for reason, found in by_reason.items()
    )
