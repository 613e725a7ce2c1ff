"""Functions that a graph calls by name: one from disk may only name those of its own model."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

from torch import fx, nn
from torch.autograd import Function

from merak.core.errors import TraceError
from merak.graph.cache.fingerprint import is_code_of
from merak.graph.ir.custom_operators import Role, custom_operator
from merak.graph.ir.ir import ModelGraph
from merak.graph.ir.serialize import find_operator, unpack
from merak.graph.trace.branches.rng_stream import draw_from_stream


def refuse_foreign_functions(graph: ModelGraph, model: nn.Module) -> None:
    """Check that the functions a graph names are autograd functions, or code of the model.

    Args:
        graph: read from disk.
        model: the model that it is read for, whose code is imported.

    Raises:
        TraceError: it names another function, which its model would never have led to.
    """
    for node in _nodes(graph):
        args: Any = node.args
        target: Any = node.target
        if target is draw_from_stream:
            target, args = find_operator(args[1]), args[2:]
        operator = custom_operator(target)
        if operator is None or operator.callee is None:
            continue
        name = args[operator.callee]
        if not _is_allowed(operator.role, name, model):
            raise TraceError(f"the graph calls {name!r}, which is no function of its model.")


def _is_allowed(role: Role, name: str, model: nn.Module) -> bool:
    found = _found(name)
    if role is Role.AUTOGRAD_FUNCTION:
        return isinstance(found, type) and issubclass(found, Function)
    return inspect.isfunction(found) and is_code_of(model, name.split(":")[0])


def _nodes(graph: ModelGraph) -> Iterator[fx.Node]:
    """All nodes of a graph, those of data-dependent regions included."""
    parts = [part.graph for part in (graph.prologue, *graph.segments)]
    for part in (*parts, *(one.graph for one in graph.parameter_writes)):
        for node in part.nodes:
            yield node
            region = node.meta.get("region")
            yield from () if region is None else unpack(region.nodes).nodes


def _found(name: str) -> Any:
    """Object of a name in the modules that are imported already."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found
