"""Trace a model as often as it takes: with more of it kept whole, and with choices both ways."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import nn

from merak.core.errors import TraceError
from merak.graph.trace.branches.branches import with_choices
from merak.graph.trace.opaque.operator import is_kept, operands
from merak.graph.trace.opaque.selection import MOST_KEPT, Keeping
from merak.graph.trace.traced import Trace

Export = Callable[[tuple[bool, ...], Keeping], Trace]
"""One trace, with answers to the model's choices, and what is kept whole."""


def trace_keeping(model: nn.Module, export: Export, keeping: Keeping) -> Trace:
    """Trace a model with no more of it kept whole than it needs.

    Where a model chooses what runs by the batch alone, a module around the choice can be kept, or
    both ways be traced: the latter where the module would be most of the model, or all of it.

    Args:
        model: the model.
        export: traces it once.
        keeping: as of `merak.graph.trace.trace.trace`.

    Raises:
        TraceError: it cannot be traced.
    """
    other = Keeping(by_batch=True)
    try:
        found = _trace(model, export, keeping)
    except TraceError as error:
        if keeping.by_batch or not keeping.asks_batch:
            raise
        try:
            found = _trace(model, export, other)
        except TraceError:
            raise error from None  # which says what is in the way without any of this
        keeping.follow(other)
        return found
    if keeping.by_batch or not keeping.asks_batch or kept_share(found) <= MOST_KEPT:
        return found
    try:
        chosen = _trace(model, export, other)
    except TraceError:
        return found
    if kept_share(chosen) >= kept_share(found):
        return found
    keeping.follow(other)
    return chosen


def _trace(model: nn.Module, export: Export, keeping: Keeping) -> Trace:
    def traced(answers: tuple[bool, ...]) -> Trace:
        return keeping.enough(model, lambda: export(answers, keeping))

    while True:
        first = traced(())
        known = keeping.known()
        chosen = with_choices(first, traced) if first.num_choices else first
        if keeping.known() == known:  # else traces of one model keep other modules
            return chosen


def kept_share(trace: Trace) -> float:
    """Share of the parameters (numbers, not tensors) that modules kept whole have."""
    sizes = {name: math.prod(meta.shape) for name, meta in trace.parameters.items()}
    kept = {
        operand.meta["name"]
        for node in trace.graph.nodes
        if is_kept(node)
        for operand in operands(node)[: node.meta["kept"].parameters]
    }
    return sum(sizes[name] for name in kept) / (sum(sizes.values()) or 1)
