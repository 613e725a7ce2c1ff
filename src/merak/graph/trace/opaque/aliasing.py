"""Storages shared between an opaque call's results and its operands.

When a segment runs, an opaque module's results have storages of their own. That equals eager code
unless something writes in place into one of two tensors that share a storage there.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import replace

from torch import fx

from merak.graph.ir.mutation import find_mutations
from merak.graph.trace.opaque.operator import OpaqueCall, is_opaque, operands
from merak.graph.trace.opaque.probe import CannotBeOpaque


def refuse_lost_writes(graph: fx.Graph) -> None:
    """Refuse writes that eager code would see through an opaque call's results or other operands.

    Calls beside which there are writes are marked: their aliases are checked when they run.

    Args:
        graph: a clean graph.

    Raises:
        CannotBeOpaque: there is one; a module further out may hold the write as well.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    last = {
        memory: max(order[node] for node in writers)
        for memory, writers in find_mutations(graph).writers.items()
    }
    for node in graph.nodes:
        if is_opaque(node):
            _refuse(node, {memory for memory, at in last.items() if at > order[node]})


def _refuse(node: fx.Node, written_later: set[int]) -> None:
    call: OpaqueCall = node.meta["opaque"]
    places = dict(_memory(node))
    for i, memory in places.items():
        if i not in call.written or memory is None:
            continue
        if any(place != i and other == memory for place, other in places.items()):
            raise CannotBeOpaque(
                call.ref.path,
                "it writes into a tensor that it is called with, of which another one that it is "
                "called with is a view",
            )
    for output, place in call.shared:
        if {places.get(~output), places.get(place)} & written_later:
            raise CannotBeOpaque(
                call.ref.path,
                "it returns a tensor that shares memory with one that it is called with or "
                "returns, and one of the two is written into later; let it return a clone",
            )
    if written_later.intersection(memory for memory in places.values() if memory is not None):
        node.meta["opaque"] = replace(call, watched=True)


def _memory(node: fx.Node) -> Iterator[tuple[int, int | None]]:
    """The storage of every tensor of a call, by its number, and of every result, by ~number."""
    for i, operand in enumerate(operands(node)):
        yield i, operand.meta.get("storage")
    for user in node.users:
        if user.target is operator.getitem:
            place = user.args[1]
            assert isinstance(place, int)
            yield ~place, user.meta.get("storage")
