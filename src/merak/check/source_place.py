"""Source lines of parameters and buffers: the segment and the line of the model that read them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from merak.graph.ir.ir import ModelGraph, Segment


@dataclass(frozen=True, slots=True)
class SourcePlace:
    """Segment and source line that read a parameter or buffer.

    Args:
        name: the parameter's or buffer's name.
        segment: index of the last segment that reads it; -1 if none does.
        segment_name: that segment's module path.
        source: file and line of the operator that reads it; "" if unknown.
    """

    name: str
    segment: int
    segment_name: str
    source: str


def latest(graph: ModelGraph, names: Iterable[str]) -> SourcePlace:
    """Return the tensor that is read last; in the backward, the first whose gradient went wrong."""
    places = [_place(graph, name) for name in names]
    return max(places, key=lambda place: place.segment)


def _place(graph: ModelGraph, name: str) -> SourcePlace:
    for segment in reversed(graph.segments):
        if name in segment.parameters or name in segment.buffers:
            return SourcePlace(name, segment.index, segment.name, _source(segment, name))
    return SourcePlace(name, -1, "read by none", "")


def _source(segment: Segment, name: str) -> str:
    for node in segment.graph.find_nodes(op="placeholder"):
        if node.meta["name"] == name:
            lines = [user.meta.get("source", "") for user in node.users]
            return next((line for line in reversed(lines) if line), "")
    return ""
