"""Values of a graph that depend on no batch and no parameter, such as tables, computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from merak.graph.ir.mutation import mutated_arguments
from merak.graph.trace.normalize import is_random

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
