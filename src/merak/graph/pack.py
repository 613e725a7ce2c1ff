"""Graphs as plain data, to be written to disk and read back quickly."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import fx
from torch.fx.node import map_aggregate

from merak.graph.ir import ModelGraph, Segment, Settled

Part = TypeVar("Part", Segment, Settled)
"""Something with a graph."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A node in the arguments of another, by its place in the graph."""

    place: int


PackedNode = tuple[str, str, str, Any, Any, dict[str, Any]]
"""Operation, target, name, args, kwargs, meta."""


def pack(graph: fx.Graph) -> tuple[PackedNode, ...]:
    """A graph as plain tuples; see `unpack`."""
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
    """The graph that `pack` was given."""
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
    """A model graph as plain data."""
    whole = {field: getattr(model, field) for field in model.__dataclass_fields__}
    return whole | {
        "segments": [_pack_segment(segment) for segment in model.segments],
        "prologue": _pack_segment(model.prologue),
        "settled": [_pack_segment(one) for one in model.settled],
    }


def unpack_model(packed: dict[str, Any]) -> ModelGraph:
    """The model graph that `pack_model` was given."""
    segments = tuple(_unpack_segment(segment) for segment in packed["segments"])
    settled = tuple(_unpack_segment(one) for one in packed["settled"])
    prologue = _unpack_segment(packed["prologue"])
    return ModelGraph(**packed | {"segments": segments, "prologue": prologue, "settled": settled})


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


def _target(name: str) -> Callable[..., Any]:
    module, _, path = name.partition(":")
    found: Any = torch.ops if module == "torch.ops" else importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    function: Callable[..., Any] = found
    return function
