"""Sub-microbatches: a segment split over the samples of a microbatch, for sub-pipelining.

A segment may run in sub-microbatches if every operator in it treats the samples of a microbatch one
by one. The sharding rules of tensor parallelism decide that: with the batch sharded as if over two
ranks, no operator may need a collective. Of an odd number of samples the first sub-microbatch has
one more; the degree is then the fraction that a sub-microbatch has. A sub-microbatch's dropout
takes its rows of the microbatch's mask, so that both give what the microbatch gives.

Source: Merak (IEEE TPDS), section 5.3.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import torch
from torch import fx

from merak.core.errors import ShardError
from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import Kind, Segment, returned_nodes
from merak.graph.ir.mutation import has_mutable_schema, mutated_arguments
from merak.graph.tensor_parallel.conversion import Step
from merak.graph.tensor_parallel.placement import (
    REPLICATE,
    Decision,
    Operator,
    Partial,
    Placement,
    ResultPlacement,
    Shard,
    is_opaque,
)
from merak.graph.tensor_parallel.propagate import Propagation
from merak.graph.tensor_parallel.rewrite import Rewriter
from merak.graph.tensor_parallel.rules.rules import decide
from merak.graph.tensor_parallel.search.cost import has_gradient
from merak.ops.sharded_dropout import attend_sharded, dropout_sharded

aten = torch.ops.aten
_DROPPING: Mapping[Any, str] = {dropout_sharded: "layout", attend_sharded: "layout"}


@dataclass(frozen=True, slots=True)
class SubMicrobatch:
    """Range of samples of a microbatch.

    Args:
        start: the first.
        stop: the one after the last.
        batch_size: samples of the microbatch.
    """

    start: int
    stop: int
    batch_size: int

    @property
    def degree(self) -> Fraction:
        """Ratio of the microbatch's size to the sub-microbatch's."""
        return Fraction(self.batch_size, self.stop - self.start)

    def rows(self, size: int) -> tuple[int, int]:
        """Start and length of the sub-microbatch in a dim that runs over the samples."""
        first, last = (size * n // self.batch_size for n in (self.start, self.stop))
        return first, last - first


def sub_microbatches(batch_size: int) -> tuple[SubMicrobatch, SubMicrobatch]:
    """Both sub-microbatches; of an odd number of samples the first has one more.

    Raises:
        ShardError: less than two samples.
    """
    if batch_size < 2:
        raise ShardError(
            f"a microbatch of {batch_size} sample cannot be split into sub-microbatches; give a "
            "microbatch two samples or more."
        )
    middle = (batch_size + 1) // 2
    return SubMicrobatch(0, middle, batch_size), SubMicrobatch(middle, batch_size, batch_size)


@dataclass(frozen=True, slots=True)
class SampleDims:
    """Sample dims of the values between segments.

    Args:
        batch_size: samples of the microbatch that the segments were traced for.
        dims: the dim along which each value has them, by name; None where it has no samples. Of
            a value that is not named, as of a column, it is the first if that is as long.
    """

    batch_size: int
    dims: Mapping[str, int | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SubMicrobatchSegments:
    """Segments of both sub-microbatches.

    Args:
        segments: what each sub-microbatch runs, with the names of the whole's inputs and outputs.
        sub_microbatches: which samples they have.
        dims: the dim along which a sub-microbatch has its part, by the name of an input, column,
            batch-only
            value or output; what is not named is the same for both.
    """

    segments: tuple[Segment, Segment]
    sub_microbatches: tuple[SubMicrobatch, SubMicrobatch]
    dims: Mapping[str, int]


def find_sample_dims(segments: Iterable[Segment], batch_size: int) -> SampleDims:
    """Sample dims of the values between consecutive segments, from the first on."""
    dims: dict[str, int | None] = {}
    if batch_size < 2:
        return SampleDims(batch_size)
    sub_microbatch, _ = sub_microbatches(batch_size)
    for segment in segments:
        placements = place_samples(segment, sub_microbatch, SampleDims(batch_size, dims)).placements
        for name, node in zip(segment.outputs, returned_nodes(segment.graph), strict=True):
            placed = placements.get(node)
            if placed == REPLICATE:
                dims[name] = None
            elif placed is not None and (dim := sample_dim(placed)) is not None:
                dims[name] = dim
    return SampleDims(batch_size, dims)


def split_segment(segment: Segment, samples: SampleDims) -> SubMicrobatchSegments:
    """Split a segment over the samples of a microbatch.

    Args:
        segment: the segment as traced; left as it is.
        samples: of the microbatch it was traced for.

    Raises:
        ShardError: a single sample, or an operator that does not treat them one by one.
    """
    both = sub_microbatches(samples.batch_size)
    first, second = (_lay_out(segment, sub_microbatch, samples) for sub_microbatch in both)
    dims = {
        node.meta["name"]: placed.dim
        for node, placed in first.placements.items()
        if node.op == "placeholder" and isinstance(placed, Shard)
    }
    for name, node in zip(segment.outputs, returned_nodes(segment.graph), strict=True):
        placed = first.placements[node]
        if placed == second.placements[node] == REPLICATE:
            continue  # both sub-microbatches make it, each for itself
        dim = sample_dim(placed)
        if dim is None or dim != sample_dim(second.placements[node]):
            raise ShardError(f"its result {name} does not belong to single samples.")
        dims[name] = dim
    if not dims.keys() & set(segment.outputs):
        raise ShardError("no result of it belongs to single samples.")
    written = (
        replace(segment, graph=_Writer(first).run(segment.graph)),
        replace(segment, graph=_Writer(second).run(segment.graph)),
    )
    return SubMicrobatchSegments(written, both, dims)


def same_operators(whole: fx.Graph, own: fx.Graph, names: Collection[str]) -> frozenset[str]:
    """Names that operators of a microbatch have in the graph of a sub-microbatch.

    Args:
        whole: graph of a segment for a microbatch.
        own: the same for a sub-microbatch.
        names: of operators of the first.

    Returns:
        None of them where the graphs are unlike in more than their sizes.
    """
    if len(whole.nodes) != len(own.nodes):
        return frozenset()
    pairs = zip(whole.nodes, own.nodes, strict=True)
    return frozenset(same.name for node, same in pairs if node.name in names)


def sample_dim(placed: ResultPlacement) -> int | None:
    """Dim of a value along which the samples are in their order; None if there is none."""
    return placed.dim if isinstance(placed, Shard) and len(placed.parts) == 1 else None


@dataclass(frozen=True, slots=True)
class SamplePlacements:
    """Placements of a segment's values in one sub-microbatch.

    Args:
        sub_microbatch: which samples the sub-microbatch has.
        placements: by node, as if the samples were split over ranks.
        decisions: by operator; fewer than the segment has, where one needs all samples.
        refusal: why there are fewer.
    """

    sub_microbatch: SubMicrobatch
    placements: Mapping[fx.Node, ResultPlacement]
    decisions: Mapping[fx.Node, Decision]
    refusal: ShardError | None = None


def place_samples(
    segment: Segment, sub_microbatch: SubMicrobatch, samples: SampleDims
) -> SamplePlacements:
    """Placements of a segment's values, up to the first operator that needs all samples."""
    placements: dict[fx.Node, ResultPlacement] = {}
    decisions: dict[fx.Node, Decision] = {}
    for node in segment.graph.nodes:
        if node.op == "placeholder":
            placements[node] = _entering(node, samples)
    for node in _operators(segment):
        try:
            decisions[node] = _decide(Operator(node, placements, sub_microbatch.degree))
        except ShardError as error:
            return SamplePlacements(sub_microbatch, placements, decisions, error)
        placements[node] = decisions[node].output
    return SamplePlacements(sub_microbatch, placements, decisions)


def _operators(segment: Segment) -> list[fx.Node]:
    return [node for node in segment.graph.nodes if node.op == "call_function"]


def _lay_out(
    segment: Segment, sub_microbatch: SubMicrobatch, samples: SampleDims
) -> SamplePlacements:
    layout = place_samples(segment, sub_microbatch, samples)
    if layout.refusal is not None:
        raise layout.refusal
    return layout


def _entering(node: fx.Node, samples: SampleDims) -> Placement:
    """Placement of a placeholder: sharded over its samples, if it has any."""
    meta, kind = node.meta["tensor"], node.meta["kind"]
    if kind in (Kind.PARAMETER, Kind.BUFFER) or not isinstance(meta, TensorMeta):
        return REPLICATE
    dim = 0 if meta.shape[:1] == (samples.batch_size,) else None
    if kind is Kind.VALUE:
        dim = samples.dims.get(node.meta["name"], dim)
    return REPLICATE if dim is None else Shard(dim, (meta.shape[dim],))


def _decide(op: Operator) -> Decision:
    """Decision of the sharding rule, where it needs nothing of the other sub-microbatch."""
    operands = op.node.all_input_nodes
    if has_mutable_schema(op.node):
        _refuse_writes(op)
    if is_opaque(op.node.target) and not op.sharded() and any(map(has_gradient, operands)):
        raise op.error("has a backward of its own, which must see the whole gradient")
    decision = decide(op)
    placed = decision.output if isinstance(decision.output, tuple) else (decision.output,)
    if decision.then or any(isinstance(p, Partial) for p in placed):
        raise op.error("sums over the samples of a microbatch")
    several = [p for p in (*placed, *decision.needs.values()) if _is_parted(p)]
    if several and (op.node.target in _DROPPING or decision.target in _DROPPING):
        raise op.error("draws for samples that do not lie in their order")
    for node, need in decision.needs.items():
        if _is_parted(need) and not isinstance(op.placement(node), Shard):
            raise op.error("takes samples that do not lie in their order")
        # A copied value is whole, too: what mixes samples would read all of them.
        if isinstance(op.placement(node), Shard) and need != op.placement(node):
            raise op.error("must see all samples of a microbatch")
    return decision


def _is_parted(placed: Placement) -> bool:
    return isinstance(placed, Shard) and len(placed.parts) > 1


def _refuse_writes(op: Operator) -> None:
    """Refuse mutations of buffers, which would happen twice."""
    for written in mutated_arguments(op.node):
        source: fx.Node | None = written
        while source is not None and source.op == "call_function":
            source = source.all_input_nodes[0] if source.all_input_nodes else None
        if source is not None and source.meta["kind"] is Kind.BUFFER:
            raise op.error("writes a buffer of the model")


class _Writer(Rewriter):
    """Rewriter of a segment's graph for one sub-microbatch, which reads its rows of whole values.

    Args:
        layout: where the samples are.
    """

    def __init__(self, layout: SamplePlacements) -> None:
        self.sub_microbatch = layout.sub_microbatch
        propagation = Propagation(layout.placements, layout.decisions)
        super().__init__(propagation, layout.sub_microbatch.degree)

    def enter(self, node: fx.Node) -> None:
        """Nothing: the gradients of sub-microbatches are summed as those of microbatches are."""

    def leave(self, output: fx.Node) -> None:
        """Results, as they are."""
        self.graph.output(fx.map_arg(output.args[0], lambda n: self.env[n]))

    def operator(self, node: fx.Node, decision: Decision) -> fx.Node:
        """Operator on the sub-microbatch's rows, dropout by its rows of the mask."""
        target = decision.target or node.target
        if target not in _DROPPING:
            return super().operator(node, decision)
        args = node.args if decision.args is None else decision.args
        kwargs = dict(node.kwargs if decision.kwargs is None else decision.kwargs)
        placed = self.propagation.placements[node]
        assert isinstance(placed, Shard)
        whole = node.meta["tensor"].shape[placed.dim]
        kwargs["rows"] = (placed.dim, self.sub_microbatch.rows(whole)[0], whole)
        if target is dropout_sharded:
            args = (*args[:3], None)
        else:
            kwargs["layout"] = None
        return super().operator(node, replace(decision, args=args, kwargs=kwargs))

    def convert(self, node: fx.Node, need: Placement | None) -> fx.Node:
        """The value, or the sub-microbatch's rows of one that is whole."""
        placed = self.propagation.placements[node]
        is_narrowed = isinstance(need, Shard) and not isinstance(placed, Shard)
        return super().convert(node, need) if is_narrowed else self.env[node]

    def conversion(self, node: fx.Node, placed: Placement, need: Placement) -> fx.Node:
        """The sub-microbatch's rows of a value."""
        assert isinstance(need, Shard)
        rows = self.sub_microbatch.rows(node.meta["tensor"].shape[need.dim])
        step = Step(placed, aten.narrow.default, (need.dim, *rows))
        return self.insert(step, self.env[node], node, need)
