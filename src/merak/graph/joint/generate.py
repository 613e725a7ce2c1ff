"""Generation: the parts of a joint graph as straight-line Python.

A part takes its arguments in a list, which it empties, and drops each value after its last use. It
runs beneath autograd: what it returns has no history.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from merak.graph.joint.bindings import binding

Part = Callable[[list[Any]], tuple[torch.Tensor, ...]]
"""Takes a list of tensors, which it empties, and returns tensors."""

Accumulate = Callable[[torch.Tensor, torch.Tensor, bool], None]


def run(part: Part, given: list[Any]) -> tuple[torch.Tensor, ...]:
    """Run a part beneath autograd, without history: what autograd would do is in it.

    Args:
        part: the function.
        given: what it takes.
    """
    is_recording = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)  # of which `torch.no_grad` makes six calls
    try:
        with torch._C._AutoDispatchBelowAutograd():
            return part(given)
    finally:
        torch._C._set_grad_enabled(is_recording)


def generate(
    reads: Sequence[fx.Node],
    nodes: Sequence[fx.Node],
    results: Sequence[fx.Node],
    accumulated: dict[fx.Node, list[tuple[int, bool]]] | None = None,
    accumulate: Accumulate | None = None,
) -> Part:
    """Function that runs some nodes of a graph.

    Args:
        reads: nodes whose values it is given, in order.
        nodes: operators that it runs, in order.
        results: nodes whose values it returns.
        accumulated: by the node that yields a gradient, the parameters (by number) that it is
            added to, and whether nobody else has its memory. The parameters are given behind
            `reads`.
        accumulate: adds a gradient to a parameter's.
    """
    accumulated = accumulated or {}
    names: dict[fx.Node, str] = {}
    scope: dict[str, Any] = {"accumulate": accumulate}
    lines = ["def part(given):"]
    for node in reads:
        names[node] = f"v{len(names)}"
    last = _last_uses(reads, nodes, results)
    parameters = sorted({number for found in accumulated.values() for number, _ in found})
    heads = [*(names[node] for node in reads), *(f"p{number}" for number in parameters)]
    if heads:
        lines.append(f"    {', '.join(heads)}, = given")
    lines.append("    given.clear()")

    def add(node: fx.Node) -> None:
        for number, owned in accumulated.get(node, ()):
            lines.append(f"    accumulate(p{number}, {names[node]}, {owned})")

    unused = [names[n] for n in reads if n not in last]
    if unused:
        lines.append(f"    del {', '.join(unused)}")
    for node in reads:
        add(node)
    for node in nodes:
        names[node] = f"v{len(names)}"
        lines.append(f"    {names[node]} = {_call(node, names, scope)}")
        add(node)
        gone = [names[n] for n in (*node.all_input_nodes, node) if last.get(n) is node]
        if gone:
            lines.append(f"    del {', '.join(dict.fromkeys(gone))}")
    returned = "".join(f"{names[node]}, " for node in results)
    lines.append(f"    return ({returned})")
    exec(compile("\n".join(lines), "<merak joint graph>", "exec"), scope)
    part: Part = scope["part"]
    return part


def _last_uses(
    reads: Sequence[fx.Node], nodes: Sequence[fx.Node], results: Sequence[fx.Node]
) -> dict[fx.Node, fx.Node | None]:
    """The node after which each value is dropped; None for results."""
    last: dict[fx.Node, fx.Node | None] = {}
    for node in nodes:
        last[node] = node
        for argument in node.all_input_nodes:
            last[argument] = node
    for node in results:
        last[node] = None
    return last


def _call(node: fx.Node, names: dict[fx.Node, str], scope: dict[str, Any]) -> str:
    if node.target is operator.getitem:
        base, place = node.args
        return f"{names[base]}[{place}]"  # type: ignore[index]
    function = binding(node)
    name = next((known for known, value in scope.items() if value is function), f"f{len(scope)}")
    scope[name] = function

    def text(value: Any) -> str:
        if isinstance(value, fx.Node):
            return names[value]
        if isinstance(value, list):
            return f"[{', '.join(map(text, value))}]"
        if isinstance(value, tuple):
            return f"({''.join(text(v) + ', ' for v in value)})"
        if value is None or isinstance(value, bool | int | str):
            return repr(value)
        if isinstance(value, float) and math.isfinite(value):
            return repr(value)
        constant = f"c{len(scope)}"
        scope[constant] = value
        return constant

    args = [text(value) for value in node.args]
    args += [f"{key}={text(value)}" for key, value in node.kwargs.items()]
    return f"{name}({', '.join(args)})"
