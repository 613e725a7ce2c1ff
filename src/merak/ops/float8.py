"""Products of linear layers in eight bits: both operands are scaled, cast and multiplied.

Each operand has one scale, a power of two, by which its largest magnitude comes near the largest
number of its type: four bits of exponent for values and weights, five for gradients, which are of
more sizes. So scales round nothing. Where ranks have shards of an operand or of its rows, the
magnitude is that of all of them, so that shards are cast as the whole is in one process.
`torch._scaled_mm` multiplies them, on a CPU in float32.

Source: FP8 Formats for Deep Learning (arXiv 2209.05433, sections 3 and 4); dynamic scaling of whole
tensors, as in torchao's `Float8Linear`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from merak.ops.vocab_parallel import vocab_parallel_max

OF_VALUES, OF_GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2

MULTIPLE = 16
"""Rows, inputs and outputs of a product are multiples of this, as the kernels of GPUs want them."""


_MOST = 126
"""Power of two of the largest scale, whose inverse float32 has as well."""

_LEAST_CAPABILITY = (8, 9)
"""Of a GPU of NVIDIA's, from which on it has such products: Ada, then Hopper."""


def has_float8(device: torch.device) -> bool:
    """Whether a GPU multiplies operands of float8; of AMD's this is left to torch to say.

    Args:
        device: one of "cuda".
    """
    is_amd = torch.version.hip is not None
    return is_amd or torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY


def float8_linears(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    dtype: torch.dtype,
    axes: tuple[str, ...],
) -> tuple[torch.Tensor, ...]:
    """Linear layers that read the same, whose products and those of gradients are of float8.

    Args:
        x: what they read, (…, inputs); it is cast once.
        weights: of each, (outputs, inputs).
        biases: of each, (outputs,), which is added to the product; or None.
        dtype: of the results.
        axes: of the mesh, along which ranks have other shards or rows of the operands.

    Returns:
        Of each, (…, outputs). Gradients have the types of what they are of.
    """
    rows = x.reshape(-1, x.shape[-1])
    found: tuple[torch.Tensor, ...] = _Products.apply(rows, dtype, axes, *weights)  # type: ignore[no-untyped-call]
    shaped = [own.view(*x.shape[:-1], own.shape[-1]) for own in found]
    return tuple(
        own if bias is None else own + bias.to(dtype)
        for own, bias in zip(shaped, biases, strict=True)
    )


class _Products(torch.autograd.Function):
    """Rows by weights, (rows, inputs) by (outputs, inputs) each."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[torch.Tensor, ...]:
        """Saves the rows in eight bits, and the weights as they came."""
        x, dtype, axes, *weights = args
        scale, *scales = _scales((x, *weights), OF_VALUES, axes)
        rows = _cast(x, scale, OF_VALUES)
        ctx.save_for_backward(rows, *scale, *weights, *(own for pair in scales for own in pair))
        ctx.dtype, ctx.axes = x.dtype, axes
        return tuple(
            multiply_scaled(rows, _cast(weight, own, OF_VALUES), scale, own, dtype)
            for weight, own in zip(weights, scales, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of the rows and of each weight, each by products of float8."""
        rows, up, down, *others = ctx.saved_tensors
        count = len(others) // 3
        weights, flat = others[:count], others[count:]
        scales = [Scale(*flat[n : n + 2]) for n in range(0, len(flat), 2)]
        of_x, of_weights, turned = None, list[torch.Tensor | None](), None
        for number, scale in enumerate(_scales(gradients, OF_GRADIENTS, ctx.axes)):
            weight, own = weights[number], scales[number]
            gradient = _cast(gradients[number], scale, OF_GRADIENTS)
            if ctx.needs_input_grad[0]:
                other = _cast(weight, own, OF_VALUES).t().contiguous()
                part = multiply_scaled(gradient, other, scale, own, ctx.dtype)
                of_x = part if of_x is None else of_x + part
            of_weight = None
            if ctx.needs_input_grad[3 + number]:
                turned = rows.t().contiguous() if turned is None else turned
                first, of_rows = gradient.t().contiguous(), Scale(up, down)
                of_weight = multiply_scaled(first, turned, scale, of_rows, weight.dtype)
            of_weights.append(of_weight)
        return of_x, None, None, *of_weights


class Scale(NamedTuple):
    """Scale of an operand.

    Attributes:
        up: what it is multiplied by, a scalar of float32.
        down: what it is multiplied by afterwards, the inverse.
    """

    up: torch.Tensor
    down: torch.Tensor


def _scales(
    operands: Sequence[torch.Tensor], dtype: torch.dtype, axes: tuple[str, ...]
) -> list[Scale]:
    """Scale of each operand, from its largest magnitude on all ranks of some axes."""
    own = [torch.linalg.vector_norm(x, math.inf, dtype=torch.float32) for x in operands]
    largest = torch.stack(own)
    for axis in axes:
        largest = vocab_parallel_max(largest.unsqueeze(1), 1, axis)
    # A magnitude is below 2 to its exponent, and then below 2 to the room.
    room = math.floor(math.log2(torch.finfo(dtype).max))
    up = (room - torch.frexp(largest).exponent).clamp(max=_MOST).to(torch.float32).exp2()
    up = up + (largest - largest)  # no number where that is none: casts would make it finite
    return [Scale(*pair) for pair in zip(up.unbind(), up.reciprocal().unbind(), strict=True)]


def _cast(x: torch.Tensor, scale: Scale, dtype: torch.dtype) -> torch.Tensor:
    # Of what float16 has, a scale may be too large.
    return ((x.float() if x.dtype == torch.float16 else x) * scale.up).to(dtype)


def multiply_scaled(
    first: torch.Tensor,
    second: torch.Tensor,
    first_scale: Scale,
    second_scale: Scale,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Product of two scaled operands, as it is without their scales.

    Args:
        first: (m, k) of float8.
        second: (n, k) of float8.
        first_scale: of the first.
        second_scale: of the second.
        dtype: of the result.

    Returns:
        (m, n).
    """
    scales = first_scale.down, second_scale.down
    fast = first.dtype == OF_VALUES  # sums of fewer bits on a GPU, which gradients are not given
    return torch._scaled_mm(first, second.t(), *scales, out_dtype=dtype, use_fast_accum=fast)
