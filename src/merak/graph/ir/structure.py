"""Structure of graphs: keys that are equal for graphs that do the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import fx

from merak.core.tensor_meta import TensorMeta


class Structure:
    """Structural key of a graph, which is hashed once: keys are long.

    Args:
        key: of the graph.
    """

    __slots__ = ("_hash", "key")

    def __init__(self, key: Any) -> None:
        self.key = key
        self._hash = hash(key)

    def __hash__(self) -> int:
        """Hash of the key."""
        return self._hash

    def __eq__(self, other: object) -> bool:
        """Whether the keys are equal."""
        if self is other:
            return True
        return isinstance(other, Structure) and self._hash == other._hash and self.key == other.key


_STRUCTURES: WeakKeyDictionary[fx.Graph, Structure] = WeakKeyDictionary()


def structure_of_graph(graph: fx.Graph) -> Structure:
    """Structural key of a graph that no longer changes, found once.

    Args:
        graph: of a segment that is complete.
    """
    known = _STRUCTURES.get(graph)
    if known is None:
        known = _STRUCTURES[graph] = Structure(structural_key(graph))
    return known


def note_copy(copy: fx.Graph, graph: fx.Graph) -> None:
    """Note that a graph that no longer changes differs from another in names alone.

    Args:
        copy: the graph.
        graph: the other, complete as well.
    """
    _STRUCTURES[copy] = structure_of_graph(graph)


def structural_key(graph: fx.Graph, *, sizes: bool = True) -> Any:
    """Hashable key that is equal for graphs that differ in names alone.

    Args:
        graph: of a segment.
        sizes: whether whole numbers and the sizes of tensors count; else graphs of one model at
            other shapes may be equal, too.
    """
    numbers = {node: number for number, node in enumerate(graph.nodes)}

    def plain(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return ("node", numbers[value])
        if isinstance(value, tuple | list):
            return tuple(plain(item) for item in value)
        if isinstance(value, Mapping):
            return tuple((key, plain(item)) for key, item in value.items())
        if isinstance(value, slice):
            return ("slice", plain(value.start), plain(value.stop), plain(value.step))
        if not sizes and type(value) is int:
            return int
        if not sizes and isinstance(value, TensorMeta):
            return (len(value.shape), value.dtype, value.requires_grad)
        return (type(value), value)

    return tuple(
        (
            node.op,
            "" if node.op in ("placeholder", "output") else node.target,
            plain(node.args) if node.op != "placeholder" else (),
            plain(node.kwargs),
            plain(node.meta.get("tensor")),
            node.meta.get("kind"),
        )
        for node in graph.nodes
    )
