"""Fallbacks of a trace that fails: more opaque modules, or both branches of its conditions."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import nn

from merak.core.errors import TraceError
from merak.graph.trace.branches.branches import merge_branches
from merak.graph.trace.opaque.operator import is_opaque, operands
from merak.graph.trace.opaque.selection import MOST_OPAQUE, OpaqueSelection
from merak.graph.trace.traced import Trace

Export = Callable[[tuple[bool, ...], OpaqueSelection], Trace]
"""Traces once, with answers to the model's conditions, and a selection of opaque modules."""


def trace_with_fallbacks(model: nn.Module, export: Export, opaque: OpaqueSelection) -> Trace:
    """Trace a model with no more opaque modules than it needs.

    Where the batch alone decides what runs, a module around the condition can be opaque, or both
    branches be traced: the latter where the module would be most of the model, or all of it.

    Args:
        model: the model.
        export: traces it once.
        opaque: as of `merak.graph.trace.trace.trace`.

    Raises:
        TraceError: it cannot be traced.
    """
    other = OpaqueSelection(by_batch=True)
    try:
        found = _trace(model, export, opaque)
    except TraceError as error:
        if opaque.by_batch or not opaque.asks_batch:
            raise
        try:
            found = _trace(model, export, other)
        except TraceError:
            raise error from None  # the first error names the cause without any fallback
        opaque.adopt(other)
        return found
    if opaque.by_batch or not opaque.asks_batch or opaque_share(found) <= MOST_OPAQUE:
        return found
    try:
        chosen = _trace(model, export, other)
    except TraceError:
        return found
    if opaque_share(chosen) >= opaque_share(found):
        return found
    opaque.adopt(other)
    return chosen


def _trace(model: nn.Module, export: Export, opaque: OpaqueSelection) -> Trace:
    def traced(answers: tuple[bool, ...]) -> Trace:
        return opaque.trace_until_supported(model, lambda: export(answers, opaque))

    while True:
        first = traced(())
        known = opaque.known()
        chosen = merge_branches(first, traced) if first.num_conditions else first
        if opaque.known() == known:  # else traces of one model have other opaque modules
            return chosen


def opaque_share(trace: Trace) -> float:
    """Fraction of the parameters' elements that opaque modules hold."""
    sizes = {name: math.prod(meta.shape) for name, meta in trace.parameters.items()}
    held = {
        operand.meta["name"]
        for node in trace.graph.nodes
        if is_opaque(node)
        for operand in operands(node)[: node.meta["opaque"].parameters]
    }
    return sum(sizes[name] for name in held) / (sum(sizes.values()) or 1)
