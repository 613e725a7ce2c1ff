"""Mutating operators: which nodes share a storage, and which operators mutate it when.

Nodes with the same `meta["storage"]` are views of one tensor, or that tensor after a write.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from merak.core.tensor_meta import requires_grad
from merak.graph.ir.ir import Kind
from merak.graph.ir.operators import RUNNING_STATISTICS, UNDECLARED_STATISTICS, aten_family
from merak.graph.ir.reachable import reachable

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Mutations:
    """Mutated storages of a graph, and the operators that mutate them.

    Args:
        writers: memory → the operators that write into it, in order.
        members: memory → the nodes that are (views of) it, in order; written memory only.
    """

    writers: dict[int, list[fx.Node]]
    members: dict[int, list[fx.Node]]

    def group(self, node: fx.Node) -> list[fx.Node]:
        """Nodes of the storages that a node belongs to or mutates: views and mutating operators."""
        memory = [
            node.meta.get("storage"),
            *(a.meta.get("storage") for a in mutated_arguments(node)),
        ]
        return [
            member
            for number in dict.fromkeys(memory)
            if number in self.writers
            for member in (*self.members[number], *self.writers[number])
        ]


def find_mutations(graph: fx.Graph) -> Mutations:
    """Mutations of a graph: every mutated storage, its views and its mutating operators."""
    writers: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        for written in mutated_arguments(node):
            writers.setdefault(_storage(written), []).append(node)
    members: dict[int, list[fx.Node]] = {memory: [] for memory in writers}
    for node in graph.nodes:
        if node.meta.get("storage") in members:
            members[node.meta["storage"]].append(node)
    return Mutations(writers, members)


def _storage(node: fx.Node) -> int:
    memory = node.meta.get("storage")
    return memory if isinstance(memory, int) else -1 - id(node)


def is_mutating(node: fx.Node) -> bool:
    """Whether the operator mutates one of its arguments."""
    return bool(mutated_arguments(node))


def has_mutable_schema(node: fx.Node) -> bool:
    """Whether the operator's schema declares a mutated argument."""
    return bool(getattr(getattr(node.target, "_schema", None), "is_mutable", False))


def mutated_arguments(node: fx.Node) -> list[fx.Node]:
    """Arguments that an operator mutates."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return []
    if not _mutated_arguments_of(target).arguments:  # of nearly all
        return []
    return [v for v in written_values(target, node.args, node.kwargs) if isinstance(v, fx.Node)]


def written_values(
    target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Any]:
    """Values among an operator's arguments that it mutates."""
    writes = _mutated_arguments_of(target)
    if not writes.arguments or (writes.flag is not None and not args[writes.flag]):
        return []
    values = (args[i] if i < len(args) else kwargs.get(n) for i, n in writes.arguments)
    return [v for value in values for v in _flat(value)]


@dataclass(frozen=True, slots=True)
class _MutatedArguments:
    """Arguments that an operator may mutate.

    Args:
        arguments: positions and names.
        flag: the argument that says whether it does; None if it always does.
    """

    arguments: tuple[tuple[int, str], ...]
    flag: int | None = None


_KNOWN: dict[int, tuple[torch._ops.OpOverload, _MutatedArguments]] = {}
"""By id of the operator, which it keeps alive: operators hash in Python, which takes longer."""


def _mutated_arguments_of(target: torch._ops.OpOverload) -> _MutatedArguments:
    known = _KNOWN.get(id(target))
    if known is None:
        known = _KNOWN[id(target)] = (target, _declared(target))
    return known[1]


def _declared(target: torch._ops.OpOverload) -> _MutatedArguments:
    named = enumerate(target._schema.arguments)
    if (flag := UNDECLARED_STATISTICS.get(aten_family(target))) is not None:
        statistics = tuple((i, a.name) for i, a in named if i in RUNNING_STATISTICS)
        return _MutatedArguments(statistics, flag)
    written = ((i, a.name) for i, a in named if a.alias_info is not None and a.alias_info.is_write)
    return _MutatedArguments(tuple(written) if target._schema.is_mutable else ())


def _flat(value: Any) -> Iterable[Any]:
    return value if isinstance(value, (list, tuple)) else (value,)


def depending_on(
    graph: fx.Graph, seeds: Iterable[fx.Node], ends: Collection[fx.Node] = ()
) -> set[fx.Node]:
    """Nodes that depend on some nodes, also through storages that are mutated.

    Args:
        graph: of the nodes.
        seeds: on which others depend.
        ends: nodes that depend on nothing.
    """
    writes = find_mutations(graph)
    stops = set(ends)

    def following(node: fx.Node) -> Iterable[fx.Node]:
        return () if node in stops else (*node.users, *writes.group(node))

    found = reachable(seeds, following) - stops
    return {node for node in found if node.op != "output"}


def eliminate_dead_code(graph: fx.Graph, kept: Iterable[fx.Node] = ()) -> None:
    """Dead-code elimination: erase what neither an output nor a mutated buffer depends on.

    Args:
        graph: changed in place.
        kept: nodes that stay, whoever reads them.
    """
    live = live_nodes(graph, [*graph.find_nodes(op="output"), *kept])
    for node in reversed(list(graph.nodes)):
        if node not in live:
            graph.erase_node(node)


def live_nodes(graph: fx.Graph, results: Iterable[fx.Node]) -> set[fx.Node]:
    """Nodes that some results or a mutated buffer depend on, the results among them."""
    writes = find_mutations(graph)
    needed = [*results]
    for memory, writers in writes.writers.items():
        if any(m.op == "placeholder" for m in writes.members[memory]):
            needed += writers
    return reachable(needed, lambda node: (*node.all_input_nodes, *writes.group(node)))


def repeat_buffer_mutations(graph: fx.Graph) -> None:
    """Buffer mutations moved up, and columns copied where the batch would be mutated.

    A column that is written is copied first: a recomputation must find it as it was. What is read
    of a buffer after the last write into it is read from a copy made right then: later segments
    may be on other ranks, and the next microbatch writes again.
    """
    writes = find_mutations(graph)
    order = {node: i for i, node in enumerate(graph.nodes)}
    for memory, writers in writes.writers.items():
        sources = [m for m in writes.members[memory] if m.op == "placeholder"]
        for source in sources:
            if source.meta["kind"] is Kind.COLUMN:
                _copy_column(graph, source, memory)
        if any(source.meta["kind"] is Kind.BUFFER for source in sources):
            _copy_saved(writes.members[memory], writers, order)
            _move_up(writes, memory, order)
            _copy_after(graph, writes.members[memory], writers[-1], order)


def _copy_column(graph: fx.Graph, column: fx.Node, memory: int) -> None:
    first = next(n for n in graph.nodes if n.op != "placeholder")
    with graph.inserting_before(first):
        copy = graph.call_function(aten.clone.default, (column,))
    column.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
    copy.meta = {k: column.meta[k] for k in ("tensor", "source", "module")} | {"storage": memory}
    column.meta["storage"] = None


def _copy_saved(
    members: Iterable[fx.Node], writers: Sequence[fx.Node], order: dict[fx.Node, int]
) -> None:
    """Let backward have the values that operators in front of a write have read of a buffer.

    As of a buffer that forward reads, and then assigns a new tensor to.
    """
    for member in members:
        before = (u for u in member.users if order.get(u, len(order)) < order[writers[0]])
        readers = [u for u in before if requires_grad(u.meta["tensor"]) and not _is_sum(u)]
        if not readers or requires_grad(member.meta["tensor"]):
            continue
        first = min(readers, key=order.__getitem__)
        with first.graph.inserting_before(first):
            copy = first.graph.call_function(aten.clone.default, (member,))
        kept = {k: member.meta[k] for k in ("tensor", "source", "module")}
        copy.meta = kept | {"storage": None}
        order[copy] = order[first]
        for reader in readers:
            reader.replace_input_with(member, copy)


def _is_sum(node: fx.Node) -> bool:
    """Whether an operator's backward needs none of its operands."""
    return aten_family(node.target) in ("add", "sub")


def _move_up(writes: Mutations, memory: int, order: dict[fx.Node, int]) -> None:
    """Mutate a buffer as soon as nothing reads its old value any more.

    What the model assigns to a buffer is written at the end of the trace, far from its readers.
    A write that something reads behind it stays where it is.
    """
    last = writes.writers[memory][-1]
    if last.target is not aten.copy_.default or last.users or not isinstance(last.args[1], fx.Node):
        return
    moved = [last]
    if last.args[1].target is aten.detach.default and len(last.args[1].users) == 1:
        moved.insert(0, last.args[1])
    members = writes.members[memory]
    readers = {n for m in members for n in (m, *m.users)} - {last}
    after = max((*readers, *moved[0].all_input_nodes), key=lambda node: order.get(node, -1))
    source = moved[0].all_input_nodes[-1].meta.get("storage")
    if source in writes.writers or order[after] > order[last]:
        return
    for node in reversed(moved):
        after.append(node)
        order[node] = order[after]


def _copy_after(
    graph: fx.Graph, members: Iterable[fx.Node], last: fx.Node, order: Mapping[fx.Node, int]
) -> None:
    for member in members:
        if order[member] > order[last]:
            continue
        late = {user for user in member.users if order[user] > order[last]}
        if not late:
            continue
        with graph.inserting_after(last):
            copy = graph.call_function(aten.clone.default, (member,))
        kept = {k: member.meta[k] for k in ("tensor", "source", "module")}
        copy.meta = kept | {"storage": None}
        for user in late:
            user.replace_input_with(member, copy)
