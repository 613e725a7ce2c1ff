"""Modules that multiply rows in groups, each group with a weight of its own.

Some experts split their rows by sizes that the host has read, multiply each part by a weight, and
concatenate the products. That is a grouped product, whose result has as many rows whatever the
sizes are. As one operator of the graph, its weights can be split over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from merak.graph.trace.opaque.functions import in_own_thread
from merak.graph.trace.opaque.operator import OpaqueCall
from merak.graph.trace.opaque.probe import undisturbed
from merak.graph.trace.opaque.run import invoke
from merak.graph.trace.state.snapshot import Snapshot
from merak.ops.grouped_product import grouped_mm_fallback

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Grouped:
    """A grouped product that a module computes.

    Args:
        is_transposed: whether a group's weight is (outputs, inputs), as of a linear layer.
        rows: place of the rows among the module's inputs.
    """

    is_transposed: bool
    rows: int


def grouped_of(call: OpaqueCall, tensors: Sequence[torch.Tensor]) -> Grouped | None:
    """The grouped product that a module computes; None if it computes anything else.

    The module is called on tensors without values, with a different size for every group, and
    every operator that it runs must belong to the product.

    Args:
        call: the call.
        tensors: its tensors; the module's own first.
    """
    inputs = tensors[len(call.states) :]
    rows = [i for i in range(len(inputs)) if i not in call.scalars]
    kinds = len(call.states), call.parameters, len(rows), len(call.cost.outputs)
    if kinds != (1, 1, 1, 1) or _has_hooks(call) or len(call.scalars) != len(tensors[0]):
        return None
    weight, x = tensors[0], inputs[rows[0]]
    if (weight.ndim, x.ndim) != (3, 2) or (call.autocast is None and weight.dtype != x.dtype):
        return None
    found = in_own_thread(_followed, call, tuple(weight.shape), (rows[0], x.shape[-1]))
    return None if found is None else Grouped(found, rows[0])


def grouped_product(
    found: Grouped, tensors: Sequence[torch.Tensor], offsets: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The product as one operator.

    Args:
        found: what the module computes.
        tensors: the module's weight, and its inputs.
        offsets: the row after the last one of every group.
        dtype: of the product, in which an autocast would multiply.
    """
    weight, x = tensors[0].to(dtype), tensors[1 + found.rows].to(dtype)
    stacked = weight.transpose(-2, -1) if found.is_transposed else weight
    return grouped_mm_fallback()(x, stacked, offsets)


def _has_hooks(call: OpaqueCall) -> bool:
    hooks, _ = call.module._get_backward_hooks()
    return bool(hooks or call.module._get_backward_pre_hooks())


def _followed(call: OpaqueCall, weight: tuple[int, ...], given: tuple[int, int]) -> bool | None:
    """Whether weights are transposed in the product; None if it is none."""
    place, width = given
    sizes = range(1, weight[0] + 1)
    stack = torch.empty(weight, device="meta")
    x = torch.empty((sum(sizes), width), device="meta")
    inputs = [torch.tensor(size) for size in sizes]
    inputs.insert(place, x)
    follower = _Follower(stack, x, list(accumulate(sizes, initial=0)))
    try:
        with undisturbed(call), torch.no_grad():
            before = Snapshot.take(call.module, attributes_only=True)
            with follower:
                result = invoke(call, [stack, *inputs])
            if before.changes():
                return None  # what it keeps, others may read
    except Exception:  # whatever the module's code does with tensors that have no values
        return None
    found = follower.meaning(result)
    return found[1] if found is not None and found[0] == "result" else None


_Meaning = tuple[Any, ...]


class _OtherOperatorError(Exception):
    """An operator on the rows or weights that is not of a grouped product."""


class _Follower(TorchDispatchMode):
    """Follows what a module's operators make of the rows and of the stack of weights.

    Args:
        stack: one weight for each group.
        x: the rows.
        edges: where groups begin, and where the last one ends.
    """

    def __init__(self, stack: torch.Tensor, x: torch.Tensor, edges: list[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.edges = edges
        self.known: dict[int, tuple[torch.Tensor, _Meaning]] = {
            id(stack): (stack, ("stack",)),
            id(x): (x, ("rows", 0, edges[-1])),
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and note what its results are.

        Raises:
            _OtherOperatorError: it takes what belongs to the product, and does not itself.
        """
        made = func(*args, **(kwargs or {}))
        if not any(self.meaning(value) for value in tree_leaves((args, kwargs))):
            return made
        if func not in _RULES or kwargs:
            raise _OtherOperatorError(str(func))  # such as one that writes into a product
        results = made if isinstance(made, (tuple, list)) else (made,)
        self.known |= {
            id(result): (result, meaning)
            for result, meaning in zip(results, _RULES[func](self, args), strict=False)
        }
        return made

    def meaning(self, value: Any) -> _Meaning | None:
        """What a value is; None for anything that is not of the product."""
        known = self.known.get(id(value))
        return None if known is None else known[1]

    def parts(self, args: Any) -> list[_Meaning]:
        """split_with_sizes of rows."""
        if self.meaning(args[0]) != ("rows", 0, self.edges[-1]) or args[2:] not in ((), (0,)):
            return []
        return [("rows", a, b) for a, b in pairwise(accumulate(args[1], initial=0))]

    def sliced(self, args: Any) -> list[_Meaning]:
        """slice of rows."""
        is_plain = len(args) == 4 and args[1] == 0 and 0 <= args[2] <= args[3] <= self.edges[-1]
        if not is_plain or self.meaning(args[0]) != ("rows", 0, self.edges[-1]):
            return []
        return [("rows", args[2], args[3])]

    def picked(self, args: Any) -> list[_Meaning]:
        """select and unbind of the stack."""
        if self.meaning(args[0]) != ("stack",) or args[1:2] not in ((), (0,)):
            return []
        return [("weight", i, False) for i in args[2:] or range(len(self.edges) - 1)]

    def flipped(self, args: Any) -> list[_Meaning]:
        """A transposed weight."""
        found = self.meaning(args[0])
        dims = args[1] if len(args) == 2 else args[1:]  # of permute, and of transpose
        if found is None or found[0] != "weight" or sorted(dims) not in ([], [0, 1], [-2, -1]):
            return []
        if len(args) == 2 and list(dims) not in ([1, 0], [-1, -2]):
            return []
        return [("weight", found[1], not found[2])]

    def multiplied(self, args: Any) -> list[_Meaning]:
        """Rows times a weight."""
        x, weight = map(self.meaning, args)
        if x is None or weight is None or (x[0], weight[0]) != ("rows", "weight"):
            return []
        return [("product", *x[1:], *weight[1:])]

    def joined(self, args: Any) -> list[_Meaning]:
        """All products in the order of their groups."""
        found = [self.meaning(one) for one in args[0]]
        for flip in (False, True):
            groups = enumerate(pairwise(self.edges))
            if found == [("product", a, b, i, flip) for i, (a, b) in groups]:
                return [("result", flip)] if args[1:] in ((), (0,)) else []
        return []


_RULES: dict[Any, Any] = {
    aten.split_with_sizes.default: _Follower.parts,
    aten.slice.Tensor: _Follower.sliced,
    aten.select.int: _Follower.picked,
    aten.unbind.int: _Follower.picked,
    aten.t.default: _Follower.flipped,
    aten.transpose.int: _Follower.flipped,
    aten.permute.default: _Follower.flipped,
    aten.mm.default: _Follower.multiplied,
    aten.cat.default: _Follower.joined,
}
"""Operators of a grouped product that is written as a loop."""
