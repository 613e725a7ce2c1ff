"""Keys of values of a graph: equal where the same operators make them of the same sources.

Values that depend on no batch and no parameter, such as tables, may be computed: their keys are
those of their numbers.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from merak.core.storages import memory_of
from merak.graph.ir.ir import returned_nodes
from merak.graph.ir.mutation import find_mutations, mutated_arguments
from merak.graph.ir.serialize import unpack
from merak.graph.trace.normalize import is_random

aten = torch.ops.aten


class ValueKeys:
    """Keys of the values of a graph, whatever the order in which its operators stand there.

    A value that an operator has written into gets another key from there on.

    Args:
        graph: with the storages of its nodes; nothing is changed.
        source: the key of a placeholder or attribute, by its node.
        begins: nodes with a key of their own; what is copied from one has that key again.
        known: the key of a value that is computed, by its node; None for none.
        through_copies: whether a copy, and a whole value that another is copied into, has the key
            of what is copied.
    """

    def __init__(
        self,
        graph: fx.Graph,
        source: Callable[[fx.Node], str],
        begins: Mapping[fx.Node, str],
        known: Callable[[fx.Node], str | None] = lambda _: None,
        through_copies: bool = False,
    ) -> None:
        self._source, self._begins, self._known = source, begins, known
        self._through_copies = through_copies
        self._written = find_mutations(graph).writers.keys()
        self._regions: dict[fx.Node, tuple[str, ...]] = {}  # keys of what each returns
        self._made: dict[fx.Node, str] = {}
        self._states: dict[int, str] = {}
        self._copied: dict[int, tuple[str, str]] = {}  # part of a storage, and what it is a copy of
        for node in graph.nodes:
            if node.op != "output":
                self._made[node] = self._make(node)
                self._write(node)
                known(node)

    def __getitem__(self, node: fx.Node) -> str:
        """Key of a node's value as it is at the end of the graph."""
        if (known := self._known(node)) is not None:
            return known
        made, storage = self._made[node], node.meta.get("storage")
        if not isinstance(storage, int) or storage not in self._written:
            return made
        state, (part, copied) = self._states.get(storage), self._copied.get(storage, ("", ""))
        if state is not None and made == part:
            return copied
        return made if state is None else _key(made, state)

    def _make(self, node: fx.Node) -> str:
        if node in self._begins:
            return self._begins[node]
        if node.op != "call_function":
            return self._source(node)
        if self._through_copies and node.target is aten.clone.default and not node.kwargs:
            copied = node.args[0]
            assert isinstance(copied, fx.Node)
            return self[copied]
        storage = node.meta.get("storage") if node.meta.get("storage") in self._written else None
        own = [n for n in mutated_arguments(node) if n.meta.get("storage") == storage is not None]
        if own and own[0].meta["tensor"] == node.meta["tensor"]:
            return self._made[own[0]]  # the same part of it, whatever its state
        if node.target is operator.getitem and node.args[0] in self._regions:
            call, place = node.args
            return self._regions[call][place]  # type: ignore[index]
        if "region" in node.meta:
            self._regions[node] = self._returned(node)
            return _key(*self._regions[node])
        return _key(str(node.target), self._arguments(node, storage))

    def _returned(self, call: fx.Node) -> tuple[str, ...]:
        """Keys of what a data-dependent region returns.

        They are those of the operators in it: its names, and the order of what it is given and
        returns, follow those of all nodes of the graph; its checks change no value.
        """
        inner = unpack(call.meta["region"].nodes)
        given = iter(call.args[1])  # type: ignore[arg-type]
        keys: dict[fx.Node, str] = {}
        for node in inner.nodes:
            if node.op == "placeholder":
                keys[node] = self[next(given)]
            elif node.op == "call_function":
                read = fx.node.map_arg((node.args, node.kwargs), lambda n: _Text(keys[n]))
                keys[node] = _key(str(node.target), repr(read))
        written = sorted(key for node, key in keys.items() if mutated_arguments(node))
        return tuple(_key(keys[node], *written) for node in returned_nodes(inner))

    def _arguments(self, node: fx.Node, storage: int | None) -> str:
        """Arguments as text; of those in a storage, what part of it they are and not its state."""

        def argument(value: fx.Node) -> _Text:
            is_inside = storage is not None and value.meta.get("storage") == storage
            return _Text(self._made[value] if is_inside else self[value])

        return repr(fx.node.map_arg((node.args, dict(node.kwargs)), argument))

    def _write(self, node: fx.Node) -> None:
        for written in mutated_arguments(node):
            storage = written.meta.get("storage")
            if not isinstance(storage, int):
                continue
            value = node.args[1] if len(node.args) > 1 else None
            self._copied.pop(storage, None)
            begun = self._begins.get(value) if isinstance(value, fx.Node) else None
            is_own = begun == self._made[written] or not self._through_copies
            if begun is not None and is_own:
                self._states.pop(storage, None)
                continue
            before, parts = self._states.get(storage, ""), self._arguments(node, storage)
            self._states[storage] = _key(before, str(node.target), parts)
            is_copy = self._through_copies and node.target is aten.copy_.default
            if is_copy and isinstance(value, fx.Node):
                old, new = written.meta["tensor"], value.meta["tensor"]
                if (old.shape, old.dtype) == (new.shape, new.dtype):
                    self._copied[storage] = self._made[written], self[value]


class _Text(str):
    """Key in the text of an operator's arguments."""

    def __repr__(self) -> str:
        return str(self)


def tensor_key(tensor: torch.Tensor) -> str:
    """Key of a constant: of its values."""
    values = memory_of(data := tensor.detach().cpu().contiguous())
    return _key(str(tuple(data.shape)), str(data.dtype), hashlib.sha1(values).hexdigest())


def _key(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=12).hexdigest()


_LARGEST = 1 << 24
"""Numbers of a tensor that is not computed: a mask of 4096 × 4096 positions is."""
_ROUNDING = 64.0
"""Units of rounding by which equal tables may differ: kernels compute rows by their number."""


class KnownValues:
    """Values of graphs, computed where that takes known tensors alone, told apart by their numbers.

    Tables of two lengths, of which one begins like the other, are made by other operators; what is
    read of them is the same.
    """

    def __init__(self) -> None:
        self._found: list[torch.Tensor] = []
        self._keys: dict[tuple[int, int], tuple[torch.Tensor, str]] = {}

    def computed(
        self, source: Callable[[fx.Node], torch.Tensor | None]
    ) -> Callable[[fx.Node], str | None]:
        """Run the known part of a graph, node by node in its order.

        Args:
            source: the tensor of a placeholder or attribute; None where it is not known.

        Returns:
            The key of a node's value of now: to be called for each node in order, and for its
            operands then; None where it is not known.
        """
        values: dict[fx.Node, Any] = {}
        unknown: set[int] = set()  # storages that what is not known has been written into
        seen: set[fx.Node] = set()

        def key(node: fx.Node) -> str | None:
            if node not in seen:
                seen.add(node)
                _compute(node, values, unknown, source)
            value = values.get(node)
            if not isinstance(value, torch.Tensor) or node.meta.get("storage") in unknown:
                return None
            return self._key(value)

        return key

    def _key(self, value: torch.Tensor) -> str:
        """Key of the numbers that a tensor has now."""
        state = (id(value), value._version)
        if state not in self._keys:
            equal = (i for i, one in enumerate(self._found) if _are_equal(one, value))
            number = next(equal, len(self._found))
            if number == len(self._found):
                self._found.append(value.clone())
            self._keys[state] = value, f"known {number}"
        return self._keys[state][1]


@torch.no_grad()
def _compute(
    node: fx.Node,
    values: dict[fx.Node, Any],
    unknown: set[int],
    source: Callable[[fx.Node], torch.Tensor | None],
) -> None:
    if node.op != "call_function":
        known = source(node)
        if known is not None:
            values[node] = known.detach().cpu().clone()
        return
    is_known = all(n in values and n.meta.get("storage") not in unknown
                   for n in node.all_input_nodes)  # fmt: skip
    if is_known and not is_random(node) and "empty" not in str(node.target):
        kwargs = {k: "cpu" if k == "device" else v for k, v in node.kwargs.items()}
        try:
            made = node.target(*fx.map_arg(node.args, values.get),  # type: ignore[operator]
                               **fx.map_arg(kwargs, values.get))  # fmt: skip
        except Exception:  # of an operator that the CPU does not have
            made = None
        if not isinstance(made, torch.Tensor) or made.numel() <= _LARGEST:
            values[node] = made
            return
    unknown |= {s for n in mutated_arguments(node) if isinstance(s := n.meta.get("storage"), int)}


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    if not (one.is_floating_point() or one.is_complex()) or not one.numel():
        return torch.equal(one, other)
    error = _ROUNDING * torch.finfo(one.dtype).eps
    largest = float(torch.nan_to_num(one.abs(), posinf=0.0).max())
    return torch.allclose(one, other, rtol=error, atol=error * largest, equal_nan=True)
