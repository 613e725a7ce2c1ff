"""Conditions written into a graph: a `where` on a random boolean for every skipped layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import fx

from merak.core.errors import TraceError
from merak.graph.ir.ir import Kind, returned_nodes
from merak.graph.ir.mutation import eliminate_dead_code, mutated_arguments
from merak.graph.ir.operators import is_weight_gemm
from merak.graph.ir.reachable import reachable
from merak.graph.trace.branches.flags import mark_condition
from merak.graph.trace.branches.graph_diff import GraphDiff, SkippedNode, conditions_of
from merak.graph.trace.branches.rng_stream import draw_from_stream
from merak.graph.trace.normalize import is_random
from merak.graph.trace.traced import Trace

aten = torch.ops.aten


def write_branches(run: Trace, found: GraphDiff, leaving: Sequence[bool]) -> None:
    """Write the conditions of a trace into its graph.

    Args:
        run: the trace with everything; changed in place.
        found: the nodes that its conditions skip.
        leaving: per condition, the answer with which it skips something.

    Raises:
        TraceError: a condition depends on parameters, or what it skips writes into a tensor.
    """
    conditions = conditions_of(run)
    places = {node: i for i, node in enumerate(run.graph.nodes)}
    _restore_buffers(run.graph, found, conditions, leaving, places)
    steps = [(d, _steps(d, found, places)) for d in found.skipped]
    passed: dict[fx.Node, fx.Node] = {}
    for skipped, points in steps:
        number = skipped.condition
        before = passed.get(skipped.instead, skipped.instead)
        select = conditions[number], leaving[number]
        passed[skipped.made] = _insert(run.graph, before, points, select)
    _draw_from_streams(run.graph, conditions)
    returned = returned_nodes(run.graph)
    run.graph.output_node().args = (returned[: len(returned) - len(conditions)],)
    eliminate_dead_code(run.graph)


def _insert(
    graph: fx.Graph, before: fx.Node, points: Iterable[fx.Node], select: tuple[fx.Node, bool]
) -> fx.Node:
    """Insert a select after each point: the value before it, or the point itself."""
    condition, leaves_out = select
    for point in points:
        with graph.inserting_after(point):
            ways = (before, point) if leaves_out else (point, before)
            taken = graph.call_function(aten.where.self, (condition, *ways))
        taken.meta = {**point.meta, "storage": None}
        for user in list(point.users):
            if user is not taken:
                user.replace_input_with(point, taken)
        before = taken
    return before


def _steps(skipped: SkippedNode, found: GraphDiff, places: dict[fx.Node, int]) -> list[fx.Node]:
    """Results of a layer's parts, each of which passes its input on when the layer is skipped.

    At each of these points one value of the result's shape is live, with weight GEMMs before and
    after it, so that the layer can be cut there. The last point is the layer's result.
    """
    if sum(other.condition == skipped.condition for other in found.skipped) > 1:
        return [skipped.made]
    own = [node for node, condition in found.inside.items() if condition == skipped.condition]
    own = [node for node in own if places[node] <= places[skipped.made]]
    place = {node: i for i, node in enumerate(own)}
    last = [_last_use(node, place) for node in own]
    ends = Counter(last)
    steps: list[fx.Node] = []
    num_alive, has_gemm = 0, False
    for i, node in enumerate(own[:-1]):
        num_alive += (last[i] > i) - (ends[i] - (last[i] == i))
        has_gemm |= is_weight_gemm(node)
        alone = num_alive == 1 and last[i] > i and _last_use(skipped.instead, place) <= i
        if alone and has_gemm and node.meta["tensor"] == skipped.made.meta["tensor"]:
            steps.append(node)
            has_gemm = False
    if steps and not any(map(is_weight_gemm, own[place[steps[-1]] + 1 :])):
        steps.pop()
    return [*steps, skipped.made]


def _last_use(node: fx.Node, place: dict[fx.Node, int]) -> int:
    """The last reader inside the layer; readers outside count only for its result."""
    return max((place[user] for user in node.users if user in place), default=-1)


def _restore_buffers(
    graph: fx.Graph,
    found: GraphDiff,
    conditions: Sequence[fx.Node],
    leaving: Sequence[bool],
    places: dict[fx.Node, int],
) -> None:
    """Let skipped layers leave buffers alone that they write, as batch norms do.

    They write into a copy, which autograd may save, and whose numbers the buffer takes if they run.
    """
    writes = _outer_writes(graph, found, conditions, places)
    last = max((n.meta.get("storage") or 0 for n in graph.nodes), default=0)
    for memory, (node, buffer) in enumerate(writes, last + 1):
        number = found.inside[node]
        with graph.inserting_before(node):
            own = graph.call_function(aten.clone.default, (buffer,))
        node.replace_input_with(buffer, own)
        ways = (buffer, own) if leaving[number] else (own, buffer)
        with graph.inserting_after(node):
            taken = graph.call_function(aten.where.self, (conditions[number], *ways))
        with graph.inserting_after(taken):
            written = graph.call_function(aten.copy_.default, (buffer, taken))
        meta = {**node.meta, "tensor": buffer.meta["tensor"]}
        own.meta, taken.meta = {**meta, "storage": memory}, {**meta, "storage": None}
        written.meta = {**meta, "storage": buffer.meta.get("storage")}
        if node.meta.get("storage") == buffer.meta.get("storage"):
            node.meta["storage"] = memory


def _outer_writes(
    graph: fx.Graph, found: GraphDiff, conditions: Sequence[fx.Node], places: dict[fx.Node, int]
) -> list[tuple[fx.Node, fx.Node]]:
    """Operators of skipped layers that write into buffers, with these.

    Raises:
        TraceError: a skipped layer writes into another outer tensor, or something into one that
            bypasses it.
    """
    firsts = {d.condition: places[conditions[d.condition]] for d in found.skipped}
    passing = {
        n.meta.get("storage"): firsts[d.condition]
        for d in found.skipped
        for n in (d.made, d.instead)
        if n.meta.get("storage") is not None
    }
    writes = []
    for node in graph.nodes:
        for written in mutated_arguments(node):
            memory = written.meta.get("storage")
            outside = node in found.inside and any(
                n.meta.get("storage") == memory and n not in found.inside
                for n in graph.nodes
                if n.op != "output"
            )
            after = memory in passing and places[node] > passing[memory]
            is_buffer = written.op == "placeholder" and written.meta["kind"] is Kind.BUFFER
            if outside and is_buffer and not after:
                writes.append((node, written))
            elif outside or after:
                raise TraceError(
                    f"the model cannot be traced: {node.meta['source']} writes in place into what "
                    "a layer that a random condition may skip reads or returns; write into a new "
                    "tensor there, or switch the dropping of layers off in the model's config."
                )
    return writes


def _draw_from_streams(graph: fx.Graph, conditions: Sequence[fx.Node]) -> None:
    """Draw the random numbers of conditions from streams of their own."""
    needed = reachable(conditions, lambda node: node.all_input_nodes)
    number = 0
    for node in list(graph.nodes):
        if node not in needed:
            continue
        if node.op == "placeholder" and node.meta["kind"] is Kind.PARAMETER:
            raise TraceError(
                f"the model cannot be traced at {conditions[0].meta['source']}: what runs next is "
                f"decided by a random number and by the parameter {node.meta['name']}; let "
                "the draw and numbers alone decide."
            )
        if node.op == "call_function" and is_random(node):
            number += 1
            node.args = (number, str(node.target), *node.args)
            node.target = draw_from_stream
            node.meta["storage"] = None
    for condition in conditions:
        mark_condition(condition)
