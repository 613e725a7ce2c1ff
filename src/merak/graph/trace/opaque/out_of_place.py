"""In-place writes of data-dependent elements, rewritten as operators that make new tensors.

`out.index_add_(0, rows, …)` and `out[rows] = …` in a loop over experts write into one tensor again
and again. Each expert's data-dependent sizes become a region of their own, and two regions cannot
write into one storage. So each returns a new tensor, which later operators read in place of the old
one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from merak.core.storages import storage_of
from merak.graph.ir.mutation import mutated_arguments
from merak.graph.ir.operators import INDEXED_WRITES, RESHAPES, SQUEEZES, aten_family

aten = torch.ops.aten

_SAME_ELEMENTS = RESHAPES | SQUEEZES | {"alias"}
"""Views of all elements in their order."""

_SCATTER: Mapping[str, Any] = {
    "select": aten.select_scatter.default,
    "slice": aten.slice_scatter.default,
}
"""Views of some elements → what puts these back."""


def write_out_of_place(graph: fx.Graph, is_open: Callable[[fx.Node], bool]) -> None:
    """Rewrite in-place writes of data-dependent elements, where all later readers are known.

    Args:
        graph: as exported, with fake tensors as `val`; changed in place.
        is_open: whether a node's value has a data-dependent size.
    """
    writes = [
        n for n in graph.nodes if any(map(is_open, n.all_input_nodes)) and mutated_arguments(n)
    ]
    if not writes:
        return
    rewriting = _Rewriting(graph)
    for node in writes:
        (written, *others) = mutated_arguments(node)
        functional = _functional(node.target)
        if functional is not None and not others and not is_open(written):
            rewriting.replace(node, written, functional)
    rewriting.refresh_views()


def _functional(target: Any) -> Any:
    """The out-of-place variant of an operator; None if there is none of the same result."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    name, _, overload = str(target).removeprefix("aten.").partition(".")
    if name not in INDEXED_WRITES:
        return None
    return getattr(getattr(aten, name.removesuffix("_"), None), overload, None)


class _Rewriting:
    """Storages of nodes, as the trace had them, and the places where they are read.

    A node that replaces a write has the write's place in the order.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.place = {node: i for i, node in enumerate(graph.nodes)}
        self.memory = {node: storage_of(node.meta.get("val")) for node in graph.nodes}
        self.members: dict[int, list[fx.Node]] = {}
        for node, number in self.memory.items():
            if number is not None:
                self.members.setdefault(number, []).append(node)
        self.fixed = {self.memory[n] for n in graph.nodes if n.op != "call_function"}
        self.roots: set[fx.Node] = set()
        self.changed: set[int] = set()

    def replace(self, node: fx.Node, written: fx.Node, functional: Any) -> None:
        """Replace an in-place write by a new tensor, if all its later readers are known."""
        number = self.memory[written]
        path = self._views(written)
        if number is None or number in self.fixed or not self._is_known(node, path, number):
            return
        pairs = list(pairwise(path))
        new = self._new(functional, node.args, node.kwargs, node, (written, node))
        # From what is written outwards to the whole tensor, and from there to the views again.
        for view, source in pairs:
            new = self._put_back(view, source, (new, node))
        self.roots.add(new)
        self._read_later(path[-1], new, node)
        for view, source in reversed(pairs):
            args = tuple(new if a is source else a for a in view.args)
            new = self._new(view.target, args, view.kwargs, view, (view, node))
            self._read_later(view, new, node)
        node.replace_all_uses_with(new)
        self.members[number].remove(node)
        self.graph.erase_node(node)
        self.changed.add(number)

    def refresh_views(self) -> None:
        """Recompute the fake values of views of new tensors."""
        for node in self.graph.nodes:
            if self.memory.get(node) in self.changed:
                args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
                with node.meta["val"].fake_mode:
                    node.meta["val"] = node.target(*args, **kwargs)

    def _views(self, written: fx.Node) -> list[fx.Node]:
        """The written tensor, its base, … up to a tensor that is no such view."""
        path = [written]
        while path[-1] not in self.roots and path[-1].op == "call_function":
            family = aten_family(path[-1].target)
            source = path[-1].args[0] if path[-1].args else None
            if family not in _SAME_ELEMENTS and family not in _SCATTER:
                break
            if not isinstance(source, fx.Node) or self.memory[source] != self.memory[written]:
                break
            path.append(source)
        return path

    def _is_known(self, node: fx.Node, path: list[fx.Node], number: int) -> bool:
        """Whether only the views of its path are read after a write, of all older ones."""
        now = self.place[node]
        others = (m for m in self.members[number] if m not in path and m is not node)
        older = (m for m in others if self.place[m] <= now)
        return not any(self.place[user] > now for member in older for user in member.users)

    def _put_back(self, view: fx.Node, source: fx.Node, new: tuple[fx.Node, fx.Node]) -> fx.Node:
        """The base of a view, with a new tensor in the view's place."""
        value, node = new
        family = aten_family(view.target)
        if family in _SCATTER:
            args = (source, value, *view.args[1:])
            return self._new(_SCATTER[family], args, view.kwargs, view, (source, node))
        sizes = list(source.meta["val"].shape)
        return self._new(aten.reshape.default, (value, sizes), {}, view, (source, node))

    def _new(
        self, target: Any, args: Any, kwargs: Any, origin: fx.Node, like: tuple[fx.Node, fx.Node]
    ) -> fx.Node:
        """Insert a node before a write, with another node's shape."""
        shaped, write = like
        with self.graph.inserting_before(write):
            made = self.graph.call_function(target, args, dict(kwargs))
        made.meta = {**origin.meta, "val": shaped.meta["val"]}
        self.memory[made], self.place[made] = self.memory[shaped], self.place[write]
        self.members.setdefault(self.memory[shaped] or 0, []).append(made)
        return made

    def _read_later(self, old: fx.Node, new: fx.Node, write: fx.Node) -> None:
        now = self.place[write]
        old.replace_all_uses_with(new, delete_user_cb=lambda user: self.place[user] > now)
