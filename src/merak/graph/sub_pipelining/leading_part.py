"""Leading part of a segment: cuts before the first operator that needs all samples.

Where a model's last block and its loss are one segment, the loss needs all samples and the block
does not. Cut between them, the block runs in sub-microbatches like all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import fx

from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import Kind, Segment, returned_nodes
from merak.graph.ir.mutation import has_mutable_schema
from merak.graph.segment.cut import sub_graph
from merak.graph.sub_pipelining.sub_microbatch import (
    SampleDims,
    SamplePlacements,
    place_samples,
    sample_dim,
    sub_microbatches,
)
from merak.graph.trace.normalize import is_random


def leading_cuts(segment: Segment, samples: SampleDims) -> Iterator[tuple[Segment, Segment]]:
    """Cuts of a segment before what needs all samples, where no more crosses than enters.

    What crosses is put together of both sub-microbatches, which costs its size. No parameter is
    read on both sides, and only the first part draws random numbers, which then are those of the
    whole.

    Args:
        segment: as traced; left as it is. One that writes in place is not cut.
        samples: of the microbatch it was traced for.

    Yields:
        Both parts, with what crosses least first, and then the latest. Values that cross have
        names that begin with the segment's number.
    """
    operators = [node for node in segment.graph.nodes if node.op == "call_function"]
    if samples.batch_size < 2 or any(has_mutable_schema(node) for node in operators):
        return
    layout = place_samples(segment, sub_microbatches(samples.batch_size)[0], samples)
    last_draw = max((i for i, node in enumerate(operators) if is_random(node)), default=-1)
    entering = segment.graph.find_nodes(op="placeholder")
    limit_bytes = sum(_bytes(n) for n in entering if sample_dim(layout.placements[n]) is not None)
    found = []
    for stop in range(last_draw + 1, len(layout.decisions) + 1):
        size = _crossing_bytes(segment, operators[:stop], layout)
        if stop and size is not None and size <= limit_bytes:
            found.append((size, -stop))
    for _, minus_stop in sorted(found):
        yield from _parts(segment, operators[:-minus_stop], operators[-minus_stop:])


def _bytes(node: fx.Node) -> int:
    meta = node.meta["tensor"]
    return meta.num_bytes if isinstance(meta, TensorMeta) else 0


def _crossing_bytes(
    segment: Segment, first: Sequence[fx.Node], layout: SamplePlacements
) -> int | None:
    """Bytes that the operators after `first` read; None if not all have a sample dim."""
    inside = set(first)
    num_bytes = 0
    for node in (*segment.graph.find_nodes(op="placeholder"), *first):
        if node.op == "placeholder" and node.meta["kind"] is not Kind.VALUE:
            continue
        if all(user in inside for user in node.users):
            continue
        meta = node.meta["tensor"]
        if not isinstance(meta, TensorMeta):
            return None
        if node.op != "placeholder" and sample_dim(layout.placements[node]) is None:
            return None
        num_bytes += meta.num_bytes
    return num_bytes


def _parts(
    segment: Segment, first: Sequence[fx.Node], second: Sequence[fx.Node]
) -> Iterator[tuple[Segment, Segment]]:
    """Both parts of a cut, unless they share a parameter."""
    returned = returned_nodes(segment.graph)
    own = {node: name for name, node in zip(segment.outputs, returned, strict=True)}
    if len(own) < len(returned):  # a value with two names
        return

    def name(node: fx.Node) -> str:
        if node.op == "placeholder":
            return str(node.meta["name"])
        return own.get(node, f"{segment.index}:{node.name}")

    later = set(second)
    crossing = [n for n in first if n in own or any(user in later for user in n.users)]
    parts = (
        _part(segment, first, crossing, name),
        _part(segment, second, [n for n in second if n in own], name),
    )
    if not set(parts[0].parameters) & set(parts[1].parameters):
        yield parts


def _part(
    segment: Segment,
    own: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    name: Callable[[fx.Node], str],
) -> Segment:
    """Segment of some operators, whose results others read by the names that it is given."""
    graph = sub_graph(own, outputs, lambda node: Kind.VALUE, name)
    return Segment.of(segment.index, segment.name, graph, map(name, outputs))
