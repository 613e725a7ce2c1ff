"""Functions that a graph calls by name: a graph from disk may only name those of its own model."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.autograd import Function

from merak.core.errors import TraceError
from merak.graph.cache.fingerprint import is_code_of
from merak.graph.ir.ir import ModelGraph
from merak.graph.ir.serialize import PackedNode, pack

_CUSTOM, _HOST = "torch.ops:merak.custom_function.default", "torch.ops:merak.host_random.default"
_DRAWN = "merak.graph.trace.branches.rng_stream:draw_from_stream"


def refuse_foreign_functions(graph: ModelGraph, model: nn.Module) -> None:
    """Check that the functions a graph names are autograd functions, or code of the model.

    Args:
        graph: read from disk.
        model: the model that it is read for, whose code is imported.

    Raises:
        TraceError: it names another function, which its model would never have led to.
    """
    for node in _nodes(graph):
        target, args = node[1], node[3]
        if target == _DRAWN and f"torch.ops:{args[1]}" == _HOST:
            target, args = _HOST, args[2:]
        if target == _CUSTOM:
            found = _found(args[1])
            is_allowed = isinstance(found, type) and issubclass(found, Function)
        elif target == _HOST:
            found = _found(args[1])
            is_allowed = inspect.isfunction(found) and is_code_of(model, args[1].split(":")[0])
        else:
            continue
        if not is_allowed:
            raise TraceError(f"the graph calls {args[1]!r}, which is no function of its model.")


def _nodes(graph: ModelGraph) -> Iterator[PackedNode]:
    """All nodes, those of data-dependent regions included."""
    parts = [part.graph for part in (graph.prologue, *graph.segments)]
    for part in (*parts, *(one.graph for one in graph.parameter_writes)):
        for node in pack(part):
            yield node
            region = node[5].get("region")
            yield from () if region is None else region.nodes


def _found(name: str) -> Any:
    """What a process that has imported the model has by this name."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found
