"""Counters, lists and dicts that forward itself changes and the next forward may compute with."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import nn

from merak.core.errors import TraceError
from merak.core.rank0 import warn_on_rank0
from merak.core.source_lines import with_text
from merak.graph.ir.ir import ModelGraph
from merak.graph.ir.state_read import StateRead
from merak.graph.segment.same_graph import is_same_graph
from merak.graph.trace.state.containers import LeftContainer, warn_of_kept
from merak.graph.trace.state.slots import Slot
from merak.graph.trace.traced import KeptTensorError

logger = logging.getLogger(__name__)


def refuse_counters(
    model: nn.Module,
    counted: Mapping[StateRead, int | float],
    graph: ModelGraph,
    trace_again: Callable[[], ModelGraph],
    loss_fn: Callable[..., Any] | None = None,
) -> None:
    """Refuse a model whose second forward would run another graph than its first one.

    A counter that is only written, or that is for logs, changes nothing: the model is traced once
    more with the numbers that its first forward has left, and the graphs are compared.

    Args:
        model: the model.
        counted: by place, numbers that forward reads and sets, as it has left them.
        graph: of the first forward.
        trace_again: traces the model.
        loss_fn: the model's loss function; None for none.

    Raises:
        TraceError: they differ, naming the number that makes the difference.
    """
    if not counted:
        return
    if _is_same(model, counted, graph, trace_again, loss_fn):
        for read in counted:
            warn_on_rank0(
                logger,
                "forward sets %s, at %s, which has no effect on later steps: a trace sets it once. "
                "What depends on it, in forward or in a callback, stays as in the first step; use "
                "register_buffer and count in place (add_), or count in a callback.",
                read,
                with_text(read.source),
            )
        return
    names: Sequence[StateRead] = list(counted)
    if len(names) > 1:
        names = [
            read
            for read, value in counted.items()
            if not _is_same(model, {read: value}, graph, trace_again, loss_fn)
        ] or names
    first = names[0]
    raise TraceError(
        f"forward sets {first} and computes with it in the next step, at "
        f"{with_text(first.source)}, which a trace would freeze; register it with register_buffer "
        "and count in place (add_), or let a callback set it between steps."
    )


def refuse_left(
    left: Mapping[str, LeftContainer],
    graph: ModelGraph,
    trace_again: Callable[[], tuple[ModelGraph, Mapping[str, LeftContainer]]],
) -> None:
    """Refuse a model that computes with what each forward leaves in a list or dict.

    The model is traced once more with them as its first forward has left them. A cache, which the
    second forward leaves as it is, may well be read: a trace makes its values in every step.

    Args:
        left: lists and dicts that the first forward has changed, by their labels.
        graph: of the first forward.
        trace_again: traces the model; returns also what it has changed then.

    Raises:
        TraceError: forward changes one every time, and the graphs differ.
    """
    if not left:
        return
    found = _changing(list(left.values()), graph, trace_again)
    if len(found) > 1:
        found = [one for one in found if _changing([one], graph, trace_again)] or found
    if found:
        first = found[0]
        where = f", at {with_text(first.line)}" if first.line else ""
        raise TraceError(
            f"forward changes {first.where} in every step and computes with what the step "
            f"before has left there{where}, which a trace would freeze; keep it in a tensor of "
            "fixed shape of register_buffer, and write into it in place (copy_, add_)."
        )
    warn_of_kept(left.values())


def _changing(
    left: Sequence[LeftContainer],
    graph: ModelGraph,
    trace_again: Callable[[], tuple[ModelGraph, Mapping[str, LeftContainer]]],
) -> list[LeftContainer]:
    """Those that a second forward changes again, if it is another one than the first."""
    with ExitStack() as stack:
        for one in left:
            stack.enter_context(one.in_place())
        try:
            again, left_again = trace_again()
        except KeptTensorError:
            return list(left)
        except TraceError:
            return []  # of values that are zeros here, such as a cache's
    found = [one for one in left if one.label in left_again]
    return [] if not found or is_same_graph(again, graph) else found


def _is_same(
    model: nn.Module,
    counted: Mapping[StateRead, int | float],
    graph: ModelGraph,
    trace_again: Callable[[], ModelGraph],
    loss_fn: Callable[..., Any] | None,
) -> bool:
    with ExitStack() as stack:
        for read, value in counted.items():
            slot = Slot(read, model, loss_fn)
            stack.callback(slot.set, slot.own())
            slot.set(value)
        try:
            again = trace_again()
        except TraceError:
            return True  # without the tensors that forward has left beside, as of a cache, it fails
        return is_same_graph(again, graph)
