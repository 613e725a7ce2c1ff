"""Experts with parameters of their own: linear layers and biases, as operators on all rows."""

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
        ctx: Any, how: tuple[bool, bool], rows: torch.Tensor, offsets: torch.Tensor, *weights: Any
    ) -> torch.Tensor:
        ctx.how, (ctx.skips_idle, is_transposed) = how, how
        ctx.save_for_backward(rows, offsets, *weights)
        product = rows.new_zeros(rows.shape[0], weights[0].shape[0 if is_transposed else 1])
        for i, group in _groups(offsets):
            weight = weights[i].t() if is_transposed else weights[i]
            torch.mm(rows[group], weight, out=product[group])
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, offsets, *weights = ctx.saved_tensors
        _, needs_rows, _, *needs_weights = ctx.needs_input_grad
        of_rows = torch.zeros_like(rows) if needs_rows else None
        of_weights = _unless(ctx, rows, [weight.shape for weight in weights])
        for i, group in _groups(offsets):
            x, own, weight = rows[group], gradient[group], weights[i]
            if of_rows is not None:
                torch.mm(own, weight if ctx.how[1] else weight.t(), out=of_rows[group])
            if needs_weights[i]:
                of_weights[i] = own.t() @ x if ctx.how[1] else x.t() @ own
        return None, of_rows, None, *of_weights


class _GroupedValues(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, skips_idle: bool, rows: torch.Tensor, offsets: torch.Tensor, *values: torch.Tensor
    ) -> torch.Tensor:
        ctx.skips_idle = skips_idle
        ctx.save_for_backward(offsets)
        ctx.shapes = [value.shape for value in values]
        result = values[0].new_zeros(rows.shape[0], *values[0].shape)
        for i, group in _groups(offsets):
            result[group] = values[i]
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (offsets,) = ctx.saved_tensors
        of_values = _unless(ctx, gradient, ctx.shapes)
        for i, group in _groups(offsets):
            of_values[i] = gradient[group].sum(0) if ctx.needs_input_grad[3 + i] else None
        return None, None, None, *of_values


def _unless(
    ctx: Any, like: torch.Tensor, shapes: Sequence[torch.Size]
) -> list[torch.Tensor | None]:
    """Gradients of experts without rows: none where these are skipped, else zeros."""
    if ctx.skips_idle and not is_fake_or_meta(like):
        return [None] * len(shapes)
    return [like.new_zeros(shape) for shape in shapes]


def _groups(offsets: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """The rows of every group that has some; sizes of fake tensors are not known."""
    if is_fake_or_meta(offsets):
        return
    for i, (start, stop) in enumerate(pairwise((0, *offsets.tolist()))):
        if start < stop:
            yield i, slice(start, stop)


def _grouped_linear(
    rows: torch.Tensor,
    weights: list[torch.Tensor],
    offsets: torch.Tensor,
    skips_idle: bool,
    is_transposed: bool,
) -> torch.Tensor:
    result: torch.Tensor = _GroupedLinear.apply(
        (skips_idle, is_transposed), rows, offsets, *weights
    )  # type: ignore[no-untyped-call]
    return result


GROUPED_LINEAR = register(
    "grouped_linear(Tensor rows, Tensor[] weights, Tensor offsets, bool skips_idle, "
    "bool is_transposed) -> Tensor",
    Role.KERNEL,
    _grouped_linear,
    is_deterministic=True,
)
"""Rows in groups, (rows, inputs), each group times a weight of its own; (rows, outputs).

`offsets`, (groups,), has the row after the last one of every group; rows behind the last group give
zeros. Weights are (inputs, outputs), and (outputs, inputs) where `is_transposed`, as of a linear
layer. With `skips_idle`, the weight of a group without rows gets no gradient, as that of a module
that is not called; else zeros.
"""


def _grouped_values(
    rows: torch.Tensor, values: list[torch.Tensor], offsets: torch.Tensor, skips_idle: bool
) -> torch.Tensor:
    result: torch.Tensor = _GroupedValues.apply(skips_idle, rows, offsets, *values)  # type: ignore[no-untyped-call]
    return result


GROUPED_VALUES = register(
    "grouped_values(Tensor rows, Tensor[] values, Tensor offsets, bool skips_idle) -> Tensor",
    Role.KERNEL,
    _grouped_values,
    is_deterministic=True,
)
"""The value of each row's group, such as a bias: (rows, …), with as many rows as `rows` has.

`offsets`, and gradients, are those of `GROUPED_LINEAR`.
"""
