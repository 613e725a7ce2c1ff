"""Linear layers of experts with weights of their own, as one operator on all rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from merak.graph.ir.custom_operators import Role, register
from merak.graph.trace.verify import is_fake_or_meta


class _GroupedLinear(torch.autograd.Function):
    """Saves rows and weights, without a copy of the weights as one stack of them would be."""

    @staticmethod
    def forward(
        ctx: Any, is_transposed: bool, rows: torch.Tensor, offsets: torch.Tensor, *weights: Any
    ) -> torch.Tensor:
        ctx.is_transposed = is_transposed
        ctx.save_for_backward(rows, offsets, *weights)
        product = rows.new_zeros(rows.shape[0], weights[0].shape[0 if is_transposed else 1])
        for group, weight in _groups(offsets, weights):
            torch.mm(rows[group], weight.t() if is_transposed else weight, out=product[group])
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, offsets, *weights = ctx.saved_tensors
        _, needs_rows, _, *needs_weights = ctx.needs_input_grad
        of_rows = torch.zeros_like(rows) if needs_rows else None
        of_weights = [
            torch.zeros_like(weight) if needed else None
            for weight, needed in zip(weights, needs_weights, strict=True)
        ]
        pairs = list(zip(weights, of_weights, strict=True))
        for group, (weight, of_weight) in _groups(offsets, pairs):
            x, own = rows[group], gradient[group]
            if of_rows is not None:
                torch.mm(own, weight if ctx.is_transposed else weight.t(), out=of_rows[group])
            if of_weight is not None:
                left, right = (own, x) if ctx.is_transposed else (x, own)
                torch.mm(left.t(), right, out=of_weight)
        return None, of_rows, None, *of_weights


def _groups(offsets: torch.Tensor, each: Sequence[Any]) -> Iterator[tuple[slice, Any]]:
    """The rows of every group that has some; sizes of fake tensors are not known."""
    if is_fake_or_meta(offsets):
        return
    for (start, stop), own in zip(pairwise((0, *offsets.tolist())), each, strict=True):
        if start < stop:
            yield slice(start, stop), own


def _grouped_linear(
    rows: torch.Tensor, weights: list[torch.Tensor], offsets: torch.Tensor, is_transposed: bool
) -> torch.Tensor:
    result: torch.Tensor = _GroupedLinear.apply(is_transposed, rows, offsets, *weights)  # type: ignore[no-untyped-call]
    return result


GROUPED_LINEAR = register(
    "grouped_linear(Tensor rows, Tensor[] weights, Tensor offsets, bool is_transposed) -> Tensor",
    Role.KERNEL,
    _grouped_linear,
    is_deterministic=True,
)
"""Rows in groups, (rows, inputs), each group times a weight of its own; (rows, outputs).

`offsets`, (groups,), has the row after the last one of every group; rows behind the last group give
zeros. Weights are (inputs, outputs), and (outputs, inputs) where `is_transposed`, as of a linear
layer. A group without rows gives its weight a gradient of zeros.
"""
