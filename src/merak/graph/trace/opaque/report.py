"""Report of a model's opaque modules and functions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from merak.graph.ir.ir import ModelGraph
from merak.graph.trace.opaque.functions import is_function
from merak.graph.trace.opaque.operator import opaque_nodes, operands


@dataclass(frozen=True, slots=True)
class OpaqueModule:
    """A module or function that is one operator of the graph.

    Args:
        module: its path in the model; of a function, "module:name".
        class_name: of the module, or "function".
        why: the line of the model that cannot be traced, and the cause.
        parameters: elements of its parameters, none of which is sharded.
        calls: how often the model calls it.
    """

    module: str
    class_name: str
    why: str
    parameters: int
    calls: int = 1


def report_opaque(graph: ModelGraph) -> list[OpaqueModule]:
    """The opaque modules and functions of a graph, in order of their first calls."""
    found: dict[str, OpaqueModule] = {}
    for node in opaque_nodes(graph):
        call = node.meta["opaque"]
        path = call.ref.path
        if path in found:
            found[path] = replace(found[path], calls=found[path].calls + 1)
            continue
        own = operands(node)[: call.parameters]
        size = sum(math.prod(operand.meta["tensor"].shape) for operand in own)
        kind = "function" if is_function(path) else call.class_name
        found[path] = OpaqueModule(path, kind, call.why, size)
    return list(found.values())


def opaque_cause(graph: ModelGraph, share: float = 0.5) -> str:
    """Clause that names the largest opaque module; "" where opaque ones have few parameters.

    Args:
        graph: the model, of whose stages or shards there are too few.
        share: of the parameters' elements, from which on opaque modules are the cause.
    """
    found = report_opaque(graph)
    every = sum(math.prod(meta.shape) for meta in graph.parameters.values())
    if sum(one.parameters for one in found) < share * every or not found:
        return ""
    one = max(found, key=lambda one: one.parameters)
    return (
        f"{one.module} ({one.class_name}) is opaque, one operator that is neither cut nor split, "
        f"for {one.why}"
    )


def opaque_lines(modules: Sequence[OpaqueModule]) -> Iterator[str]:
    """The report as lines of text; modules that differ only in their path share a line."""
    groups: dict[tuple[str, str], list[OpaqueModule]] = {}
    for one in modules:
        groups.setdefault((one.class_name, one.why), []).append(one)
    for (class_name, why), members in groups.items():
        first, *others = (one.module for one in members)
        more = f" and {len(others)} more" if others else ""
        size = sum(one.parameters for one in members)
        yield (
            f"opaque: {first}{more} ({_kind(class_name, size)}): {why}; it runs as plain "
            "PyTorch, and tensor parallelism does not split it"
        )


def _kind(class_name: str, size: int) -> str:
    return class_name if class_name == "function" else f"{class_name}, {size:,} parameters"
