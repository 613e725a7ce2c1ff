"""All-reduces as two operators, start and wait, between which something else runs.

Two sub-microbatches of a segment run in turns: one until it has started an all-reduce, then the
other one.

Source: Merak (IEEE TPDS), section 5.3.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import zip_longest

from torch import fx

from merak.graph.joint.clean import has_effect
from merak.graph.joint.derive import JointGraph
from merak.graph.joint.parts import PartNodes, Parts
from merak.ops.collectives import ALL_REDUCE, begin_all_reduce, end_all_reduce


def start_early(joint: JointGraph) -> None:
    """Make two operators of each all-reduce, in place, as far apart as they may be.

    Effects stay in their order, so ranks send in the same one.
    """
    for node in list(joint.graph.nodes):
        if node.op != "call_function" or node.target is not ALL_REDUCE:
            continue
        place = node
        while _may_follow(place.prev, node):
            place = place.prev
        with joint.graph.inserting_before(place):
            start = joint.graph.call_function(begin_all_reduce, node.args, node.kwargs)
        start.meta = {**node.meta, "origin": ""}
        node.target, node.args, node.kwargs = end_all_reduce, (start,), {}
        node.meta.pop("taken_bytes", None)
        order = {other: number for number, other in enumerate(joint.graph.nodes)}
        min(node.users, key=order.__getitem__, default=joint.graph.output_node()).prepend(node)


def _may_follow(node: fx.Node, start: fx.Node) -> bool:
    """Whether an operator may come behind the start of an all-reduce."""
    if node.op != "call_function" or node in start.all_input_nodes or has_effect(node):
        return False
    return bool(node.meta["is_backward"] == start.meta["is_backward"])


def starts_all_reduce(node: fx.Node) -> bool:
    """Whether a node starts an all-reduce, behind which something else may run."""
    return node.target is begin_all_reduce


def in_turns(parts: Sequence[PartNodes]) -> PartNodes:
    """One part that runs several, each up to the next all-reduce that it starts."""
    pieces = [_pieces(part.nodes) for part in parts]
    turns = zip_longest(*pieces, fillvalue=())
    return PartNodes(
        tuple(node for part in parts for node in part.reads),
        tuple(node for turn in turns for piece in turn for node in piece),
        tuple(node for part in parts for node in part.results),
        {node: found for part in parts for node, found in part.accumulated.items()},
    )


def all_in_turns(parts: Sequence[Parts[PartNodes]]) -> Parts[PartNodes]:
    """The parts of several segments that run in turns."""
    weights = [own.weights for own in parts if own.weights is not None]
    return replace(
        parts[0],
        forward=in_turns([own.forward for own in parts]),
        plain=in_turns([own.plain for own in parts]),
        recompute=in_turns([own.recompute for own in parts]),
        backward=in_turns([own.backward for own in parts]),
        weights=in_turns(weights) if weights else None,
    )


def with_recomputation(parts: Parts[PartNodes]) -> Parts[PartNodes]:
    """The parts of a segment whose backward begins with its recomputation."""
    first, then = parts.recompute, parts.backward
    made = {*first.results}
    both = PartNodes(
        tuple(dict.fromkeys([*first.reads, *(node for node in then.reads if node not in made)])),
        (*first.nodes, *then.nodes),
        then.results,
        then.accumulated,
    )
    return replace(parts, backward=both)


def _pieces(nodes: Iterable[fx.Node]) -> list[list[fx.Node]]:
    pieces: list[list[fx.Node]] = [[]]
    for node in nodes:
        pieces[-1].append(node)
        if starts_all_reduce(node):
            pieces.append([])
    return pieces
