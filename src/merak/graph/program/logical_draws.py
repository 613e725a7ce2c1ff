"""Random draws in the logical order of elements, whatever the memory format of an operand.

torch draws in the order of memory, and no layout keeps that: what goes to another stage, or is
reduced over ranks, arrives contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import fx

from merak.graph.ir.operators import RNNS, family
from merak.graph.trace.normalize import is_random

_DRAW_INSIDE = ("attention", "packed_")
"""Parts of the names of operators that draw for values which they compute themselves, in an order
of their own; recurrent ones do so as well."""


def draws_by_memory(node: fx.Node) -> bool:
    """Whether an operator draws in the order in which an operand's elements lie in memory."""
    if node.op != "call_function" or not is_random(node) or not node.all_input_nodes:
        return False
    # Of an operator of another library nobody knows whether it draws, and in which order.
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    own = family(node.target)
    return own not in RNNS and not any(part in own for part in _DRAW_INSIDE)


def draw_in_logical_order(graph: fx.Graph) -> None:
    """Make a graph's random operators draw in logical order; contiguous operands keep their kernel.

    Args:
        graph: changed in place.
    """
    for node in filter(draws_by_memory, list(graph.nodes)):
        node.target = _in_logical_order(node.target)


@cache
def _in_logical_order(draw: torch._ops.OpOverload) -> Callable[..., Any]:
    """An operator on contiguous copies of operands that are not; what it writes is copied back."""
    writes = draw._schema.is_mutable

    def drawn(*args: Any, **kwargs: Any) -> Any:
        own = [_contiguous(argument) for argument in args]
        result = draw(*own, **kwargs)
        if not writes or own[0] is args[0]:
            return result
        return args[0].copy_(result)

    drawn.__name__ = drawn.__qualname__ = family(draw)
    return drawn


def _contiguous(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return argument.contiguous()
    if isinstance(argument, (list, tuple)):
        return [_contiguous(each) for each in argument]
    return argument
