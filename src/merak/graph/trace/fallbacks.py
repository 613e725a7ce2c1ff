"""Trace a model as often as it takes: with more of it kept whole, and with choices both ways."""

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
"""One trace, with answers to the model's choices, and what is kept whole."""


def trace_with_fallbacks(model: nn.Module, export: Export, opaque: OpaqueSelection) -> Trace:
    """Trace a model with no more of it kept whole than it needs.

    Where a model chooses what runs by the batch alone, a module around the choice can be kept, or
    both ways be traced: the latter where the module would be most of the model, or all of it.

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
            raise error from None  # which says what is in the way without any of this
        opaque.follow(other)
        return found
    if opaque.by_batch or not opaque.asks_batch or opaque_share(found) <= MOST_OPAQUE:
        return found
    try:
        chosen = _trace(model, export, other)
    except TraceError:
        return found
    if opaque_share(chosen) >= opaque_share(found):
        return found
    opaque.follow(other)
    return chosen


def _trace(model: nn.Module, export: Export, opaque: OpaqueSelection) -> Trace:
    def traced(answers: tuple[bool, ...]) -> Trace:
        return opaque.enough(model, lambda: export(answers, opaque))

    while True:
        first = traced(())
        known = opaque.known()
        chosen = merge_branches(first, traced) if first.num_conditions else first
        if opaque.known() == known:  # else traces of one model keep other modules
            return chosen


def opaque_share(trace: Trace) -> float:
    """Share of the parameters (numbers, not tensors) that modules kept whole have."""
    sizes = {name: math.prod(meta.shape) for name, meta in trace.parameters.items()}
    kept = {
        operand.meta["name"]
        for node in trace.graph.nodes
        if is_opaque(node)
        for operand in operands(node)[: node.meta["opaque"].parameters]
    }
    return sum(sizes[name] for name in kept) / (sum(sizes.values()) or 1)
