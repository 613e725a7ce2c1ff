"""Structure of graphs: keys that are equal for graphs that do the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from merak.core.tensor_meta import TensorMeta


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
