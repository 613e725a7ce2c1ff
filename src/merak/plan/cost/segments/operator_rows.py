"""Operators of segments, with the FLOPs and saved bytes of each, forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from merak.graph.ir.ir import Kind, Segment
from merak.graph.ir.operators import family
from merak.graph.ir.structure import Structure, structure_of_graph
from merak.plan.cost.operators import is_view, node_work, outputs
from merak.plan.cost.segments.measured import SegmentMemories


@dataclass(frozen=True, slots=True)
class OperatorRow:
    """An operator of a segment, for one microbatch on one rank.

    Args:
        part: "forward"; "backward"; or "weight gradient", which a split backward leaves for later.
        operator: its name.
        shape: of its result.
        flops: of its products.
        saved_bytes: of what it makes and the forward saves for the backward.
    """

    part: str
    operator: str
    shape: tuple[int, ...]
    flops: float
    saved_bytes: int


@dataclass(frozen=True, slots=True)
class SegmentOperators:
    """Operators of all segments with equal graphs.

    Args:
        name: of the first of them.
        count: how many there are.
        input_bytes: of their inputs, those that the backward reads.
        operators: in order; of the forward alone where autograd runs the backward.
    """

    name: str
    count: int
    input_bytes: int
    operators: list[OperatorRow]


def segment_operators(
    segments: Iterable[Segment], device: torch.device, kernels: str
) -> list[SegmentOperators]:
    """Operators of a rank's segments, once for those with equal graphs.

    Args:
        segments: of a rank.
        device: of fake tensors.
        kernels: type of the device whose kernels run.
    """
    by_structure: dict[Structure, list[Segment]] = {}
    for segment in segments:
        by_structure.setdefault(structure_of_graph(segment.graph), []).append(segment)
    return [_operators(found, device, kernels) for found in by_structure.values()]


def _operators(equal: Sequence[Segment], device: torch.device, kernels: str) -> SegmentOperators:
    segment = equal[0]
    joint = SegmentMemories(device, kernels=kernels).joint_parts(segment)
    saved = {} if joint is None else joint.saved_bytes()
    rows = [
        _row("forward", node, kernels, saved.get(node.name, 0))
        for node in segment.graph.nodes
        if node.op == "call_function" and (node.name in saved or not is_view(node))
    ]
    if joint is None:
        return SegmentOperators(segment.name, len(equal), 0, rows)
    later = () if joint.split.weights is None else joint.split.weights.nodes
    for node in joint.whole.backward.nodes:
        part = "weight gradient" if node in later else "backward"
        rows += [] if is_view(node) else [_row(part, node, kernels)]
    read = [joint.arguments[number] for number in joint.whole.reads]
    layouts = [node.meta["layout"] for node in read if node.meta["kind"] is Kind.VALUE]
    held = {layout.storage: layout.storage_bytes for layout in layouts}
    return SegmentOperators(segment.name, len(equal), sum(held.values()), rows)


def _row(part: str, node: fx.Node, kernels: str, saved_bytes: int = 0) -> OperatorRow:
    made = outputs(node)
    return OperatorRow(
        part,
        family(node.target).lstrip("_"),
        made[0].shape if made else (),
        sum(work.flops for work in node_work(node, kernels).forward),
        saved_bytes,
    )
