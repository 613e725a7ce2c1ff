"""Mutated buffers of training, by how they differ between replicas that see other samples."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from torch import fx

from merak.graph.ir.ir import LITERAL, Kind, ModelGraph, Segment, returned_nodes
from merak.graph.ir.mutation import depending_on, find_mutations, mutated_arguments
from merak.graph.ir.operators import BATCH_NORMS, RUNNING_STATISTICS, family
from merak.graph.ir.replicas import is_same_on_replicas
from merak.graph.trace.branches.rng_stream import is_stream_draw
from merak.graph.trace.normalize import is_random
from merak.graph.trace.opaque.operator import is_opaque


class WrittenBuffer(Enum):
    """Dependence of a mutated buffer's new value.

    Attributes:
        SAME: on parameters and buffers alone (averaged weights, a spectral norm's vectors, counts
            of steps), or on what all replicas have brought together: replicas that have run equally
            many microbatches have the same.
        MEAN: the running statistics of norms of a batch, which training writes and does not read:
            a mean over microbatches, whose mean over replicas is that of the whole batch.
        READ_MEAN: such statistics that training does read.
        SAMPLES: on samples or random numbers in any other way (a queue, codes that follow what
            chooses them): each replica makes its own.
    """

    SAME = "same"
    MEAN = "mean"
    READ_MEAN = "read mean"
    SAMPLES = "samples"


DIFFERS = (WrittenBuffer.SAMPLES, WrittenBuffer.READ_MEAN)
"""Kinds of buffers with which replicas compute something else than one process does."""


def classify_written_buffers(graph: ModelGraph, num_pipes: int = 1) -> dict[str, WrittenBuffer]:
    """Mutated buffers of a training graph, in its order, and the kind of each.

    Args:
        graph: the model.
        num_pipes: copies of the stages, of which each runs some of the microbatches: what is the
            same for equally many microbatches is not, then.
    """
    only_statistics: dict[str, bool] = {}
    read = set(graph.prologue.buffers)
    for segment in graph.segments:
        writes = find_mutations(segment.graph)
        for node in _buffers(segment.graph):
            name, memory = node.meta["name"], node.meta.get("storage")
            writers = writes.writers.get(memory, []) if memory is not None else []
            if writers and not name.startswith(LITERAL):
                known = only_statistics.get(name, True)
                only_statistics[name] = known and all(_is_statistic(w, node) for w in writers)
            if not all(_is_statistic(user, node) for user in node.users):
                read.add(name)
    varying = _varying(graph) if only_statistics else frozenset()
    kinds = {}
    for name, is_statistic in only_statistics.items():
        if name not in varying:
            kinds[name] = WrittenBuffer.SAME if num_pipes == 1 else WrittenBuffer.SAMPLES
        elif not is_statistic:
            kinds[name] = WrittenBuffer.SAMPLES
        else:
            kinds[name] = WrittenBuffer.READ_MEAN if name in read else WrittenBuffer.MEAN
    return kinds


def written_buffers(graph: fx.Graph) -> tuple[str, ...]:
    """Names of the buffers that a segment mutates."""
    members = find_mutations(graph).members.values()
    nodes = (node for members_of in members for node in members_of if node.op == "placeholder")
    return tuple(node.meta["name"] for node in nodes if node.meta["kind"] is Kind.BUFFER)


def _varying(graph: ModelGraph) -> frozenset[str]:
    """Names of the buffers that depend on samples or random numbers."""
    values, buffers = frozenset[str](), frozenset[str]()
    while True:
        known = (values, buffers)
        values |= _outputs_with(graph.prologue, values, buffers)
        for segment in graph.segments:
            values |= _outputs_with(segment, values, buffers)
            buffers |= _reached_buffers(segment, values, buffers)
        if known == (values, buffers):
            return buffers


def _reached(segment: Segment, values: frozenset[str], buffers: frozenset[str]) -> set[fx.Node]:
    """Nodes of a segment that depend on columns, some values and buffers, or random numbers."""

    def varies(node: fx.Node) -> bool:
        if node.op == "call_function":
            return is_random(node) or is_stream_draw(node) or is_opaque(node)
        if node.op != "placeholder":
            return False
        kind, name = node.meta["kind"], node.meta["name"]
        return kind is Kind.COLUMN or name in (buffers if kind is Kind.BUFFER else values)

    nodes = segment.graph.nodes
    return depending_on(
        segment.graph, [n for n in nodes if varies(n)], [n for n in nodes if is_same_on_replicas(n)]
    )


def _outputs_with(
    segment: Segment, values: frozenset[str], buffers: frozenset[str]
) -> frozenset[str]:
    reached = _reached(segment, values, buffers)
    made = zip(segment.outputs, returned_nodes(segment.graph), strict=True)
    return frozenset(name for name, node in made if node in reached)


def _reached_buffers(
    segment: Segment, values: frozenset[str], buffers: frozenset[str]
) -> frozenset[str]:
    """Mutated buffers whose new value depends on samples or random numbers."""
    reached = _reached(segment, values, buffers)
    names = set(written_buffers(segment.graph))
    return frozenset(
        node.meta["name"]
        for node in _buffers(segment.graph)
        if node in reached and node.meta["name"] in names
    )


def _is_statistic(user: fx.Node, buffer: fx.Node) -> bool:
    """Whether an operator only updates running statistics in a buffer."""
    if family(user.target) not in BATCH_NORMS or buffer not in mutated_arguments(user):
        return False
    places = [i for i, argument in enumerate(user.args) if argument is buffer]
    return bool(places) and all(place in RUNNING_STATISTICS for place in places)


def _buffers(graph: fx.Graph) -> Iterable[fx.Node]:
    return [n for n in graph.find_nodes(op="placeholder") if n.meta["kind"] is Kind.BUFFER]
