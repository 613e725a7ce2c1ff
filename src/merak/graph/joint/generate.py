"""Generation: the parts of a joint graph as straight-line Python.

A part takes its arguments in a list, which it empties, and drops each value after its last use. It
runs beneath autograd: what it returns has no history. One that starts all-reduces is several
functions, between which something else may run.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from merak.graph.joint.all_reduces import starts_all_reduce
from merak.graph.joint.derive import Layout
from merak.graph.joint.parts import PartNodes

Piece = Callable[[list[Any]], tuple[torch.Tensor, ...]]
"""Takes a list of tensors, which it empties; fills it for the next piece, or returns tensors."""

Part = tuple[Piece, ...]
"""Pieces of a part; all but the last one end in an all-reduce that they have started."""

Accumulate = Callable[[torch.Tensor, torch.Tensor, bool], None]


def run(part: Part, given: list[Any]) -> tuple[torch.Tensor, ...]:
    """Run a part beneath autograd, without history: what autograd would do is in it.

    Gradients count as wanted, as where the graph was recorded: there are operators of torch's that
    keep what their backward reads only then, such as an LSTM's on the CPU.

    Args:
        part: its functions, or some of them that come next.
        given: what the first one takes.
    """
    is_recording = torch.is_grad_enabled()
    torch._C._set_grad_enabled(True)  # of which `torch.enable_grad` makes six calls
    try:
        with torch._C._AutoDispatchBelowAutograd():
            for piece in part:
                results = piece(given)
        return results
    finally:
        torch._C._set_grad_enabled(is_recording)


def generate(part: PartNodes, accumulate: Accumulate | None = None) -> Part:
    """Functions that run a part.

    Args:
        part: its nodes.
        accumulate: adds a gradient to a parameter's.
    """
    names: dict[fx.Node, str] = {}
    scope: dict[str, Any] = {"accumulate": accumulate}
    lines: list[str] = []
    for node in part.reads:
        names[node] = f"v{len(names)}"
    last = part.last_uses()
    alive = dict.fromkeys(
        (*(names[node] for node in part.reads), *(f"p{n}" for n in part.parameters))
    )
    num_pieces = 0

    def begin() -> None:
        nonlocal num_pieces
        lines.append(f"def piece_{num_pieces}(given):")
        lines.extend([f"    {', '.join(alive)}, = given"] if alive else [])
        lines.append("    given.clear()")
        num_pieces += 1

    def drop(nodes: Iterable[fx.Node]) -> None:
        gone = dict.fromkeys(names[node] for node in nodes)
        lines.extend([f"    del {', '.join(gone)}"] if gone else [])
        for name in gone:
            del alive[name]

    def add(node: fx.Node) -> None:
        for number, owned in part.accumulated.get(node, ()):
            lines.append(f"    accumulate(p{number}, {names[node]}, {owned})")

    begin()
    drop(node for node in part.reads if node not in last)
    for node in part.reads:
        add(node)
    for node in part.nodes:
        names[node] = f"v{len(names)}"
        alive[names[node]] = None
        lines.append(f"    {names[node]} = {_call(node, names, scope)}")
        add(node)
        drop(n for n in (*node.all_input_nodes, node) if last.get(n) is node)
        if starts_all_reduce(node):
            lines.append(f"    given[:] = {', '.join(alive)},")
            begin()
    returned = "".join(f"{names[node]}, " for node in part.results)
    lines.append(f"    return ({returned})")
    exec(compile("\n".join(lines), "<merak joint graph>", "exec"), scope)
    return tuple(scope[f"piece_{number}"] for number in range(num_pieces))


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


# Python bindings of operators, which cost less to call than `torch.ops`: one is taken where a
# call of it has been seen to reach the same overload with the same arguments.


_FUNCTIONS = (torch._C._VariableFunctions, torch._C._nn)

_KNOWN: dict[Any, Callable[..., Any]] = {}


def binding(node: fx.Node) -> Callable[..., Any]:
    """Function that calls the operator of a node of a joint graph, with the node's arguments."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return target  # type: ignore[return-value]
    key = (target, _pattern(node.args), _pattern(node.kwargs))
    if key not in _KNOWN:
        _KNOWN[key] = _find(target, node)
    return _KNOWN[key]


def _pattern(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(map(_pattern, value))
    if isinstance(value, Mapping):
        return tuple((name, _pattern(one)) for name, one in value.items())
    return type(value)


def _find(target: torch._ops.OpOverload, node: fx.Node) -> Callable[..., Any]:
    fallback: Callable[..., Any] = target._op
    if target.namespace != "aten":
        return fallback
    name = target._schema.name.removeprefix("aten::")
    is_method = target._schema.arguments[0].name == "self" if target._schema.arguments else False
    holders = (*_FUNCTIONS, torch._C.TensorBase) if is_method else _FUNCTIONS
    candidates = [getattr(holder, name) for holder in holders if hasattr(holder, name)]
    with FakeTensorMode(), torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        args: Any = fx.map_arg(node.args, _fake)
        kwargs: Any = fx.map_arg(node.kwargs, _fake)
        for candidate in candidates:
            wanted = _Seen(target, args, kwargs)
            try:
                with wanted:
                    candidate(*args, **kwargs)
            except (RuntimeError, TypeError, NotImplementedError, ValueError, IndexError):
                continue
            if wanted.is_reached:
                return candidate  # type: ignore[no-any-return]
    return fallback


def _fake(node: fx.Node) -> torch.Tensor | int:
    layout: Layout | None = node.meta["layout"]
    if layout is None:
        number: int = node.meta["number"]
        return number
    return torch.empty_strided(
        layout.shape, layout.stride, dtype=layout.dtype, device=layout.device
    )


class _Seen(TorchDispatchMode):
    """Whether the first operator that is called is the wanted one."""

    def __init__(self, target: Any, args: Any, kwargs: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._wanted = (target, args, kwargs)
        self._calls = 0
        self.is_reached = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "prim":  # such as a question for the device
            self._calls += 1
            is_same = _is_same((func, args, kwargs or {}), self._wanted)
            self.is_reached = self._calls == 1 and is_same
        return func(*args, **(kwargs or {}))


def _is_same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, tuple | list):
        is_list = isinstance(found, tuple | list) and len(found) == len(wanted)
        return is_list and all(map(_is_same, found, wanted))
    if isinstance(wanted, Mapping):
        return found.keys() == wanted.keys() and all(_is_same(found[k], wanted[k]) for k in wanted)
    if isinstance(wanted, torch.Tensor):
        return found is wanted
    return type(found) is type(wanted) and bool(found == wanted)
