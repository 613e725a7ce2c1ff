"""Gradients on one rank: the type that they are summed in, and how one is added to another."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def add_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add to a parameter's gradient, as autograd does."""
    if parameter.grad is None:
        parameter.grad = gradient.to(gradient_dtype(parameter))
    else:
        parameter.grad += gradient


def dense(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient that can be summed with others of any kind."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """What a parameter's gradient is summed in."""
    return parameter.grad_dtype or parameter.dtype


def no_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Zeros in the place of a gradient that is not there."""
    return torch.zeros_like(parameter, dtype=gradient_dtype(parameter), requires_grad=False)


def is_low_precision(parameter: torch.Tensor) -> bool:
    """Whether gradients of its own type would lose what many microbatches add."""
    return parameter.dtype in (torch.bfloat16, torch.float16)


def sum_in_float32(leaves: Iterable[torch.Tensor]) -> None:
    """Let gradients of low precision be summed over microbatches and ranks in float32."""
    for leaf in leaves:
        if leaf.requires_grad and is_low_precision(leaf) and leaf.grad is None:
            leaf.grad_dtype = torch.float32
