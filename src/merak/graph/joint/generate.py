"""Generation: the parts of a joint graph as straight-line Python.

A part takes its arguments in a list, which it empties, and drops each value after its last use. It
runs beneath autograd: what it returns has no history.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from merak.graph.joint.bindings import binding
from merak.graph.joint.parts import PartNodes

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


def generate(part: PartNodes, accumulate: Accumulate | None = None) -> Part:
    """Function that runs a part.

    Args:
        part: its nodes.
        accumulate: adds a gradient to a parameter's.
    """
    names: dict[fx.Node, str] = {}
    scope: dict[str, Any] = {"accumulate": accumulate}
    lines = ["def part(given):"]
    for node in part.reads:
        names[node] = f"v{len(names)}"
    last = part.last_uses()
    heads = [*(names[node] for node in part.reads), *(f"p{n}" for n in part.parameters)]
    if heads:
        lines.append(f"    {', '.join(heads)}, = given")
    lines.append("    given.clear()")

    def add(node: fx.Node) -> None:
        for number, owned in part.accumulated.get(node, ()):
            lines.append(f"    accumulate(p{number}, {names[node]}, {owned})")

    unused = [names[n] for n in part.reads if n not in last]
    if unused:
        lines.append(f"    del {', '.join(unused)}")
    for node in part.reads:
        add(node)
    for node in part.nodes:
        names[node] = f"v{len(names)}"
        lines.append(f"    {names[node]} = {_call(node, names, scope)}")
        add(node)
        gone = [names[n] for n in (*node.all_input_nodes, node) if last.get(n) is node]
        if gone:
            lines.append(f"    del {', '.join(dict.fromkeys(gone))}")
    returned = "".join(f"{names[node]}, " for node in part.results)
    lines.append(f"    return ({returned})")
    exec(compile("\n".join(lines), "<merak joint graph>", "exec"), scope)
    function: Part = scope["part"]
    return function


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
