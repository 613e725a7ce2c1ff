"""Write into a trace what its choices leave out: a `where` on a draw for every dropped layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from merak.core.errors import TraceError
from merak.graph.ir.ir import Kind
from merak.graph.ir.mutation import eliminate_dead_code, mutated_arguments
from merak.graph.ir.operators import is_weight_gemm
from merak.graph.trace.branches.flags import mark_condition
from merak.graph.trace.branches.graph_diff import GraphDiff, SkippedNode, conditions_of
from merak.graph.trace.branches.rng_stream import draw_from_stream
from merak.graph.trace.normalize import is_random
from merak.graph.trace.traced import Trace

aten = torch.ops.aten


def write_branches(run: Trace, found: GraphDiff, leaving: Sequence[bool]) -> None:
    """Let the graph of a trace make its choices by itself.

    Args:
        run: the trace with everything; changed in place.
        found: what its choices leave out.
        leaving: per choice, with which answer it leaves something out.

    Raises:
        TraceError: a choice hangs on more than chance, or what it leaves out writes into a tensor.
    """
    choices = conditions_of(run)
    places = {node: i for i, node in enumerate(run.graph.nodes)}
    _refuse_writes(run.graph, found, choices, places)
    steps = [(d, _steps(d, found, places)) for d in found.dropped]
    passed: dict[fx.Node, fx.Node] = {}
    for dropped, points in steps:
        number = dropped.choice
        before = passed.get(dropped.instead, dropped.instead)
        choice = choices[number], leaving[number]
        passed[dropped.made] = _insert(run.graph, before, points, choice)
    _draw_apart(run.graph, choices)
    (output,) = run.graph.find_nodes(op="output")
    returned: Any = output.args[0]
    output.args = (tuple(returned[: len(returned) - len(choices)]),)
    eliminate_dead_code(run.graph)


def _insert(
    graph: fx.Graph, before: fx.Node, points: Iterable[fx.Node], choice: tuple[fx.Node, bool]
) -> fx.Node:
    """After each point, what was there before it or the point itself: the layer in steps."""
    condition, leaves_out = choice
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


def _steps(dropped: SkippedNode, found: GraphDiff, places: dict[fx.Node, int]) -> list[fx.Node]:
    """Results of a layer's parts, each of which passes its input on when the layer is dropped.

    Those are values like the layer's result that alone live on, with products by weights on both
    sides; so the layer can be cut there. The last one is its result.
    """
    if sum(other.choice == dropped.choice for other in found.dropped) > 1:
        return [dropped.made]
    own = [node for node, choice in found.inside.items() if choice == dropped.choice]
    own = [node for node in own if places[node] <= places[dropped.made]]
    place = {node: i for i, node in enumerate(own)}
    last = [_last_use(node, place) for node in own]
    ends = Counter(last)
    steps: list[fx.Node] = []
    num_alive, has_gemm = 0, False
    for i, node in enumerate(own[:-1]):
        num_alive += (last[i] > i) - (ends[i] - (last[i] == i))
        has_gemm |= is_weight_gemm(node)
        alone = num_alive == 1 and last[i] > i and _last_use(dropped.instead, place) <= i
        if alone and has_gemm and node.meta["tensor"] == dropped.made.meta["tensor"]:
            steps.append(node)
            has_gemm = False
    if steps and not any(map(is_weight_gemm, own[place[steps[-1]] + 1 :])):
        steps.pop()
    return [*steps, dropped.made]


def _last_use(node: fx.Node, place: dict[fx.Node, int]) -> int:
    """The last reader inside the layer; a reader outside counts as none, but for its result."""
    return max((place[user] for user in node.users if user in place), default=-1)


def _refuse_writes(
    graph: fx.Graph, found: GraphDiff, choices: Sequence[fx.Node], places: dict[fx.Node, int]
) -> None:
    """What a dropped layer writes must be its own, and nobody may write into what passes it."""
    firsts = {d.choice: places[choices[d.choice]] for d in found.dropped}
    passing = {
        n.meta.get("storage"): firsts[d.choice]
        for d in found.dropped
        for n in (d.made, d.instead)
        if n.meta.get("storage") is not None
    }
    for node in graph.nodes:
        for written in mutated_arguments(node):
            memory = written.meta.get("storage")
            outside = node in found.inside and any(
                n.meta.get("storage") == memory and n not in found.inside
                for n in graph.nodes
                if n.op != "output"
            )
            after = memory in passing and places[node] > passing[memory]
            if outside or after:
                raise TraceError(
                    f"the model cannot be traced: {node.meta['source']} writes in place into what "
                    "a layer that may be dropped by chance reads, gives or keeps; write into a new "
                    "tensor there, or switch the dropping of layers off in the model's config."
                )


def _draw_apart(graph: fx.Graph, choices: Sequence[fx.Node]) -> None:
    """Let what choices depend on be drawn from streams of their own, and from nothing else."""
    needed: set[fx.Node] = set()
    todo = list(choices)
    while todo:
        node = todo.pop()
        if node in needed:
            continue
        needed.add(node)
        todo += node.all_input_nodes
    number = 0
    for node in list(graph.nodes):
        if node not in needed:
            continue
        if node.op == "placeholder" and node.meta["kind"] is Kind.PARAMETER:
            raise TraceError(
                f"the model cannot be traced at {choices[0].meta['source']}: it chooses what runs "
                f"next by a random draw and by the parameter {node.meta['name']}; let the draw and "
                "numbers alone decide."
            )
        if node.op == "call_function" and is_random(node):
            number += 1
            node.args = (number, str(node.target), *node.args)
            node.target = draw_from_stream
            node.meta["storage"] = None
    for choice in choices:
        mark_condition(choice)
