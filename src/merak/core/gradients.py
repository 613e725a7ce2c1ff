"""Gradients on one rank: the type that they are accumulated in, and their accumulation."""

from __future__ import annotations

from collections.abc import Iterable

import torch

LOW_PRECISION = frozenset({torch.bfloat16, torch.float16})
"""Types whose sums over many microbatches lose precision."""


def add_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Accumulate into a parameter's gradient, as autograd does."""
    if parameter.grad is None:
        parameter.grad = gradient.to(gradient_dtype(parameter))
    else:
        parameter.grad += gradient


def accumulate(parameter: torch.Tensor, gradient: torch.Tensor, owned: bool) -> None:
    """Accumulate a backward's gradient into a parameter's, as autograd does, to the bit.

    Hooks that a user has registered on the parameter are called.

    Args:
        parameter: gains it.
        gradient: of its shape.
        owned: whether nobody else has its memory, so that it may become the parameter's.
    """
    if hooks := parameter._backward_hooks:
        for hook in hooks.values():
            changed = hook(gradient)
            if changed is not None:
                gradient, owned = changed, False
    known = parameter.grad
    if known is None:
        parameter.grad = _first(parameter, gradient, owned)
    else:
        known.add_(gradient)
    if hooks := parameter._post_accumulate_grad_hooks:
        for hook in hooks.values():
            hook(parameter)


def _first(parameter: torch.Tensor, gradient: torch.Tensor, owned: bool) -> torch.Tensor:
    """The first gradient, laid out as its parameter is."""
    made = gradient.to(gradient_dtype(parameter))
    owned = owned or made is not gradient
    if parameter.is_contiguous() and not made.is_contiguous():
        return made.contiguous()
    if parameter.is_contiguous() or made.stride() == parameter.stride():
        return made if owned else made.clone()
    return torch.empty_like(parameter, dtype=made.dtype).copy_(made)


def dense(gradient: torch.Tensor) -> torch.Tensor:
    """Return the dense form of a gradient that may be sparse."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the type that a parameter's gradient is accumulated in."""
    return parameter.grad_dtype or parameter.dtype


def no_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Return zeros in place of a gradient that is None."""
    return torch.zeros_like(parameter, dtype=gradient_dtype(parameter), requires_grad=False)


def is_low_precision(parameter: torch.Tensor) -> bool:
    """Whether gradients of the parameter's own type lose precision over many microbatches."""
    return parameter.dtype in LOW_PRECISION


def sum_in_float32(leaves: Iterable[torch.Tensor]) -> None:
    """Accumulate and reduce gradients of low precision in float32."""
    for leaf in leaves:
        if leaf.requires_grad and is_low_precision(leaf) and leaf.grad is None:
            leaf.grad_dtype = torch.float32
