"""Operators that are linear in a tensor, as two plain functions: forward and adjoint.

`linear` hands both to autograd, the one place that does. `sends` notes what a collective runs on
the links in each direction, for what prices it or decides where it is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import fx

F = TypeVar("F", bound=Callable[..., Any])


def _own(own: int, *arguments: Any) -> int:
    return own


Sent = tuple[tuple[str, int, str], ...]
"""Kind, bytes and axis of collectives."""


@dataclass(frozen=True, slots=True)
class Sends:
    """Collectives that a function of a tensor runs on the links of an axis.

    Args:
        there: the kind that its forward runs, as links are measured; None where nothing is sent.
        back: the kind that its adjoint runs.
        size: bytes of the value that all ranks hold together, of the bytes of the larger of the
            rank's tensors, before and behind, and of all arguments, with metadata of tensors.
        is_repeated: whether the backward runs the forward's once more.
        counts: whether it sends numbers of rows alone, which are its result.
        inside: what a forward with work of its own sends amid that, of all arguments, with metadata
            of tensors; None where that is nothing.
        axis: of the mesh, where no argument of that name says it.
    """

    there: str | None = None
    back: str | None = None
    size: Callable[..., int] = _own
    is_repeated: bool = False
    counts: bool = False
    inside: Callable[..., Sent] | None = None
    axis: str = ""


SENDS: dict[Any, Sends] = {}
"""Functions of tensors on the ranks of an axis, and what they send."""


OPERATORS_SEND: dict[Any, Sends] = {}
"""Functions that are one operator to who records a graph, and what they send."""


def sends(there: str | None = None, back: str | None = None, **facts: Any) -> Callable[[F], F]:
    """Decorator that records the collectives of a function; arguments are those of `Sends`."""

    def noted(function: F) -> F:
        SENDS[function] = Sends(there, back, **facts)
        return function

    return noted


def operator_sends(kind: str | None = None, **facts: Any) -> Callable[[F], F]:
    """Decorator that records the collective of a function that `one_operator` then decorates.

    Args:
        kind: of the collective that it is, as links are measured; None where it is more than that.
        **facts: others of `Sends`.
    """

    def noted(function: F) -> F:
        OPERATORS_SEND[function] = Sends(kind, **facts)
        return function

    return noted


def sent_by(target: Any) -> Sends:
    """Collectives of an operator, of a segment's graph or of a joint graph."""
    return SENDS.get(target) or OPERATORS_SEND.get(target) or Sends()


def sent_inside(target: Any, args: Any) -> Sent:
    """Collectives inside an operator's forward, by the arguments of its node."""
    sent = sent_by(target)
    if sent.inside is None:
        return ()
    return sent.inside(*fx.map_arg(args, lambda node: node.meta["tensor"]))


def linear(
    there: Callable[..., torch.Tensor], back: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """Function that is linear in its first tensor, with a gradient by its adjoint.

    Args:
        there: the forward, of a tensor and further arguments, which get no gradient.
        back: the adjoint, of a gradient and the same arguments.

    Returns:
        The forward, as autograd differentiates it.
    """

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: torch.Tensor, *arguments: Any) -> torch.Tensor:
            ctx.arguments = arguments
            return there(tensor, *arguments)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            arguments = ctx.arguments
            return back(gradient, *arguments), *(None for _ in arguments)

    apply: Callable[..., torch.Tensor] = Linear.apply
    return apply


def with_gradient(
    tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Identity whose gradient is changed on its way back.

    By a hook, since what a function of autograd's own returns may not be written in place. Where
    backward gives no gradient, it gives none on every rank, and nothing is changed or sent.

    Args:
        tensor: any values.
        change: makes of the gradient, where there is one, the gradient of `tensor`.

    Returns:
        A view of the tensor.
    """
    entering = tensor.view_as(tensor)
    if entering.requires_grad:
        entering.register_hook(lambda found: None if found is None else change(found))
    return entering
