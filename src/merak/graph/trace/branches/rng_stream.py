"""Random streams for conditions and masks: the same numbers on every rank of a replica."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from merak.core.errors import TraceError
from merak.core.random import seed_for
from merak.graph.ir.serialize import find_operator, may_call
from merak.graph.trace.branches.flags import is_condition


@may_call
def draw_from_stream(number: int, operator: str, *args: Any, **kwargs: Any) -> Any:
    """Draw from a stream that is seeded by the default generator's seed and a number.

    Args:
        number: number of the draw in the model.
        operator: its name, such as aten.rand.default; one that writes gets a copy to write into.
        args: of that operator.
        kwargs: of that operator.
    """
    draw = find_operator(operator)
    assert draw is not None, operator
    seed = seed_for(torch.initial_seed(), "choice", number)
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        if draw._schema.is_mutable:
            args = (args[0].clone(), *args[1:])
        return draw(*args, **kwargs)


def is_stream_draw(node: fx.Node) -> bool:
    """Whether an operator draws from a stream of its own."""
    return node.target is draw_from_stream


def refuse_late_conditions(operators: Iterable[fx.Node]) -> None:
    """Refuse conditions among a segment's operators: they are evaluated before a microbatch runs.

    Args:
        operators: those that run with the segments.

    Raises:
        TraceError: one of them is a condition or its random draw.
    """
    for node in (n for n in operators if is_stream_draw(n) or is_condition(n)):
        raise TraceError(
            f"the model cannot be traced: {node.meta['source']} draws, or decides what runs next, "
            "by something that the model itself computes or writes while it runs; let that depend "
            "on nothing but the batch, numbers and buffers that forward leaves as they are."
        )
