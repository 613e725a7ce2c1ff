"""Writes of what is picked by values into a model's own tensors, as operators that make new ones.

`out.index_add_(0, rows, …)` and `out[rows] = …` in a loop over experts write into one tensor again
and again. What has sizes that depend on values becomes an operator of its own for each expert, and
two of these cannot write into one memory. So each makes a new tensor, which all that comes later
reads in the place of the old one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import fx

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
    """Let writes of picks make new tensors, wherever all that reads the old ones is known.

    Args:
        graph: as exported, with fake tensors as `val`; changed in place.
        is_open: whether a size of what a node yields depends on values.
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
    rewriting.settle()


def _functional(target: Any) -> Any:
    """The operator that makes a new tensor where this one writes; None if it is of no such kind."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    name, _, overload = str(target).removeprefix("aten.").partition(".")
    if name not in INDEXED_WRITES:
        return None
    return getattr(getattr(aten, name.removesuffix("_"), None), overload, None)


class _Rewriting:
    """Knows which nodes lie in one memory, as the trace had it, and where it is read later.

    A node that is made for a write has the place of the write in the order.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.place = {node: i for i, node in enumerate(graph.nodes)}
        self.memory = {node: _storage(node) for node in graph.nodes}
        self.members: dict[int, list[fx.Node]] = {}
        for node, number in self.memory.items():
            if number is not None:
                self.members.setdefault(number, []).append(node)
        self.fixed = {self.memory[n] for n in graph.nodes if n.op != "call_function"}
        self.roots: set[fx.Node] = set()
        self.changed: set[int] = set()

    def replace(self, node: fx.Node, written: fx.Node, functional: Any) -> None:
        """Put a new tensor in the place of what one operator writes, if nothing is missed so."""
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

    def settle(self) -> None:
        """Give the views of what is new the memory of it."""
        for node in self.graph.nodes:
            if self.memory.get(node) in self.changed:
                args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
                with node.meta["val"].fake_mode:
                    node.meta["val"] = node.target(*args, **kwargs)

    def _views(self, written: fx.Node) -> list[fx.Node]:
        """What is written, what that is a view of, … up to a tensor that is no such view."""
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
        """Whether nothing older in this memory is read after a write, but the views of its path."""
        now = self.place[node]
        others = (m for m in self.members[number] if m not in path and m is not node)
        older = (m for m in others if self.place[m] <= now)
        return not any(self.place[user] > now for member in older for user in member.users)

    def _put_back(self, view: fx.Node, source: fx.Node, new: tuple[fx.Node, fx.Node]) -> fx.Node:
        """The tensor that a view is of, with what is new in the view's place."""
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
        """A node before a write, and of what shape: that of another one."""
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


def _storage(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return int(value.untyped_storage()._cdata)
