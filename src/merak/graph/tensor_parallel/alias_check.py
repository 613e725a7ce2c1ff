"""Alias check of sharded values: a mutation of a gathered copy would be lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import fx

from merak.core.errors import ShardError
from merak.graph.ir.mutation import Mutations, find_mutations, is_mutating, mutated_arguments
from merak.graph.tensor_parallel.placement import (
    Decision,
    Replicate,
    ResultPlacement,
    need_of,
    where,
)

Placements = Mapping[fx.Node, ResultPlacement]
Decisions = Mapping[fx.Node, Decision]


def refuse_lost_writes(graph: fx.Graph, placements: Placements, decisions: Decisions) -> None:
    """Refuse placements under which a mutation misses one of its readers.

    Where a view, or what is written, needs another placement of its operand, it gets a copy: what
    is then written into the one is missing in the other.

    Args:
        graph: the segment's operators.
        placements: placements of their results.
        decisions: what becomes of them.

    Raises:
        ShardError: something is read that a write, made into another copy of it, has not reached.
    """
    if not any(is_mutating(node) for node in decisions):
        return
    writes = find_mutations(graph)
    order = {node: i for i, node in enumerate(graph.nodes)}
    for memory, writers in writes.writers.items():
        copies = _copies(memory, writes, placements, decisions)
        for writer in writers:
            reached = _reached(writer, memory, copies, placements, decisions)
            for stale in (node for node, copy in copies.items() if copy not in reached):
                readers = [n for n in stale.users if order[n] > order[writer]]
                if readers and order[stale] < order[writer]:
                    raise _error(writer, readers[0])


def _copies(
    memory: int, writes: Mutations, placements: Placements, decisions: Decisions
) -> dict[fx.Node, int]:
    """Copy of a storage that each of its nodes then is (a view of)."""
    found: dict[fx.Node, int] = {}
    for node in _with_tuples(writes.members[memory]):
        decision = decisions.get(node)
        sources = [n for n in _aliased(node, memory) if n in found]
        if decision is None or not sources:
            found[node] = 0 if decision is None else len(found)
        elif decision.then or any(_moves(n, decision, placements) for n in sources):
            found[node] = len(found)
        else:
            found[node] = found[sources[0]]
    return found


def _with_tuples(members: list[fx.Node]) -> Iterator[fx.Node]:
    """Nodes of a storage in order, with each tuple before the first node taken from it."""
    seen: set[fx.Node] = set()
    for node in members:
        for each in (*(n for n in node.all_input_nodes if _is_tuple(n)), node):
            if each not in seen:
                seen.add(each)
                yield each


def _is_tuple(node: fx.Node) -> bool:
    return isinstance(node.meta.get("tensor"), tuple)


def _aliased(node: fx.Node, memory: int) -> list[fx.Node]:
    """Operands that a node may be a view of."""
    return [n for n in node.all_input_nodes if n.meta.get("storage") == memory or _is_tuple(n)]


def _moves(operand: fx.Node, decision: Decision, placements: Placements) -> bool:
    placed, need = placements[operand], need_of(operand, decision, placements)
    return need is not None and placed != need and not isinstance(placed, Replicate)


def _reached(
    writer: fx.Node,
    memory: int,
    copies: Mapping[fx.Node, int],
    placements: Placements,
    decisions: Decisions,
) -> set[int]:
    """Copies of a storage that a mutation reaches; one that returns nothing may miss all."""
    if writer in copies:
        return {copies[writer]}
    decision = decisions.get(writer)
    targets = [
        n for n in mutated_arguments(writer) if n in copies and n.meta.get("storage") == memory
    ]
    stay = [n for n in targets if decision is None or not _moves(n, decision, placements)]
    return {copies[n] for n in stay}


def _error(writer: fx.Node, reader: fx.Node) -> ShardError:
    return ShardError(
        f"tensor parallelism cannot go on at {writer.name} ({where(writer)}): it writes into a "
        f"copy of a split value that {reader.name} ({where(reader)}) reads afterwards; give the "
        "layers before it Replicate() in the feature dict."
    )
