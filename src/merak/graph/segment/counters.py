"""Counters: numbers that forward itself changes, and that the next forward may compute with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from torch import nn

from merak.core.errors import TraceError
from merak.core.source_lines import with_text
from merak.graph.ir.ir import ModelGraph
from merak.graph.ir.state_read import StateRead
from merak.graph.segment.same_graph import is_same_graph
from merak.graph.trace.state.slots import Slot


def refuse_counters(
    model: nn.Module,
    counted: Mapping[StateRead, int | float],
    graph: ModelGraph,
    trace_again: Callable[[], ModelGraph],
) -> None:
    """Refuse a model whose second forward would run another graph than its first one.

    A counter that is only written, or that is for logs, changes nothing: the model is traced once
    more with the numbers that its first forward has left, and the graphs are compared.

    Args:
        model: the model.
        counted: by place, numbers that forward reads and sets, as it has left them.
        graph: of the first forward.
        trace_again: traces the model.

    Raises:
        TraceError: they differ, naming the number that makes the difference.
    """
    if not counted or _is_same(model, counted, graph, trace_again):
        return
    names: Sequence[StateRead] = list(counted)
    if len(names) > 1:
        names = [
            read
            for read, value in counted.items()
            if not _is_same(model, {read: value}, graph, trace_again)
        ] or names
    first = names[0]
    raise TraceError(
        f"forward sets {first} and computes with it in the next step, at "
        f"{with_text(first.source)}, which a trace would freeze; register it with register_buffer "
        "and count in place (add_), or let a callback set it between steps."
    )


def _is_same(
    model: nn.Module,
    counted: Mapping[StateRead, int | float],
    graph: ModelGraph,
    trace_again: Callable[[], ModelGraph],
) -> bool:
    with ExitStack() as stack:
        for read, value in counted.items():
            slot = Slot(read, model, None)
            stack.callback(slot.set, slot.own())
            slot.set(value)
        try:
            again = trace_again()
        except TraceError:
            return True  # without the tensors that forward has left beside, as of a cache, it fails
        return is_same_graph(again, graph)
