"""Graph serialisation: graphs as plain data, to be written to disk and read back quickly."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ParamSpec, TypeVar

import torch
from torch import fx
from torch.fx.node import map_aggregate

from merak.graph.ir.ir import ModelGraph, ParameterWrites, Segment
from merak.ops.grouped_product import grouped_mm_fallback

P = ParamSpec("P")
R = TypeVar("R")
Part = TypeVar("Part", Segment, ParameterWrites)
"""Something with a graph."""


@dataclass(frozen=True, slots=True)
class Ref:
    """Reference to a node among the arguments of another, by its index in the graph."""

    place: int


PackedNode = tuple[str, str, str, Any, Any, dict[str, Any]]
"""Operation, target, name, args, kwargs, meta."""


def pack(graph: fx.Graph) -> tuple[PackedNode, ...]:
    """Graph as plain tuples; see `unpack`."""
    place = {node: i for i, node in enumerate(graph.nodes)}

    def plain(argument: Any) -> Any:
        if isinstance(argument, tuple):
            return tuple(plain(a) for a in argument)
        if isinstance(argument, list):
            return [plain(a) for a in argument]
        if isinstance(argument, dict):
            return {key: plain(a) for key, a in argument.items()}
        if isinstance(argument, slice):
            return slice(plain(argument.start), plain(argument.stop), plain(argument.step))
        return Ref(place[argument]) if isinstance(argument, fx.Node) else argument

    return tuple(
        (n.op, _target_name(n.target), n.name, plain(n.args), plain(n.kwargs), n.meta)
        for n in graph.nodes
    )


def unpack(packed: tuple[PackedNode, ...]) -> fx.Graph:
    """Graph that `pack` was given."""
    graph = fx.Graph()
    nodes: list[fx.Node] = []

    def real(argument: Any) -> Any:
        return nodes[argument.place] if isinstance(argument, Ref) else argument

    for op, target, name, args, kwargs, meta in packed:
        found = target if op in ("placeholder", "output") else _target(target)
        node = graph.create_node(
            op, found, map_aggregate(args, real), map_aggregate(kwargs, real), name
        )
        node.meta = meta
        nodes.append(node)
    return graph


def pack_model(model: ModelGraph) -> dict[str, Any]:
    """Model graph as plain data."""
    whole = {field: getattr(model, field) for field in model.__dataclass_fields__}
    return whole | {
        "segments": [_pack_segment(segment) for segment in model.segments],
        "prologue": _pack_segment(model.prologue),
        "parameter_writes": [_pack_segment(one) for one in model.parameter_writes],
    }


def unpack_model(packed: dict[str, Any]) -> ModelGraph:
    """Model graph that `pack_model` was given."""
    segments = tuple(_unpack_segment(segment) for segment in packed["segments"])
    parameter_writes = tuple(_unpack_segment(one) for one in packed["parameter_writes"])
    prologue = _unpack_segment(packed["prologue"])
    return ModelGraph(
        **packed
        | {"segments": segments, "prologue": prologue, "parameter_writes": parameter_writes}
    )


def _pack_segment(segment: Part) -> tuple[Part, tuple[PackedNode, ...]]:
    return replace(segment, graph=None), pack(segment.graph)  # type: ignore[arg-type]


def _unpack_segment(packed: tuple[Part, tuple[PackedNode, ...]]) -> Part:
    segment, nodes = packed
    return replace(segment, graph=unpack(nodes))


def _target_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return f"torch.ops:{target}"
    if isinstance(target, str):
        return target
    return f"{target.__module__}:{target.__qualname__}"


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    _target_name(function): function
    for function in (
        *(getattr(operator, name) for name in (
            "getitem add sub mul floordiv truediv mod pow neg pos abs lshift rshift "
            "eq ne lt le gt ge and_ or_ xor not_ inv iadd isub imul"
        ).split()),
        *(getattr(math, name) for name in "ceil floor trunc sqrt".split()),
        *(function for name, function in vars(torch).items() if name.startswith("sym_")),
    )
}  # fmt: skip
"""Functions beside operators of torch that a graph may call."""


def may_call(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: a function of Merak's own that graphs read from disk may call."""
    _FUNCTIONS[_target_name(function)] = function
    return function


def _target(name: str) -> Callable[..., Any]:
    """Function that graphs may call: an operator on tensors, or one of a closed list.

    Raises:
        ValueError: it is none.
    """
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    module, _, path = name.partition(":")
    if path.startswith("transformers."):
        grouped_mm_fallback()  # registers it

    found = find_operator(path) if module == "torch.ops" else None
    if found is None:
        raise ValueError(f"{name!r} is no function that a graph may call")
    return found


@cache
def find_operator(path: str) -> torch._ops.OpOverload | None:
    """Operator of a name such as aten.add.Tensor; None for none, and for one on files."""
    names = path.split(".")
    if len(names) != 3 or not all(name.isidentifier() for name in names):
        return None
    namespace, name, overload = names
    found: Any = torch.ops
    for part, kind in (
        (namespace, torch._ops._OpNamespace),
        (name, torch._ops.OpOverloadPacket),
        (overload, torch._ops.OpOverload),
    ):
        found = getattr(found, part, None)
        if not isinstance(found, kind):
            return None
    # Others are TorchScript's, of which some write files; and some operators read them.
    is_dispatched = torch._C._dispatch_has_kernel(found.name())
    takes_files = any(
        a.name in ("filename", "path") and isinstance(a.type, torch.StringType)
        for a in found._schema.arguments
    )  # the path of an einsum is the order of its products
    return found if is_dispatched and not takes_files else None
