"""Writes where a mask is true, of a value that gets a gradient.

How many elements a mask selects is known where it runs alone, and the gradient of what is written
begins with these elements. It is one operator here, from the mask to the value's own shape, so
that a graph of the backward has none of an unknown size. Bits are those of `index_put_`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from merak.ops.recording import one_operator

aten = torch.ops.aten


def writes_where(node: fx.Node) -> bool:
    """Whether a node writes a value that gets a gradient where a mask is true."""
    if node.target is not aten.index_put_.default or len(node.args) != 3:
        return False
    written, masks, value = node.args
    mask = masks[0] if isinstance(masks, list | tuple) and len(masks) == 1 else None
    if not all(isinstance(one, fx.Node) for one in (written, mask, value)):
        return False
    dtype, gains = (mask.meta["tensor"].dtype, value.meta["tensor"].requires_grad)  # type: ignore[union-attr]
    return bool(dtype == torch.bool and gains)


def write_where(
    tensor: torch.Tensor, masks: Sequence[torch.Tensor], value: torch.Tensor
) -> torch.Tensor:
    """Write a value into a tensor where a mask is true, in place.

    Args:
        tensor: of any shape, and of the value's element type.
        masks: a single one, of the tensor's first dims.
        value: broadcast to what the mask selects.

    Returns:
        The tensor.
    """
    (mask,) = masks
    return _Write.apply(tensor, mask, value)  # type: ignore[no-any-return, no-untyped-call]


class _Write(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, mask: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """The tensor, written."""
        ctx.mark_dirty(tensor)
        ctx.save_for_backward(mask)
        ctx.shape = value.shape
        return tensor.index_put_([mask], value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, None, Any]:
        """Gradients of what was there before, and of the value."""
        (mask,) = ctx.saved_tensors
        zero = torch.zeros((), dtype=gradient.dtype, device=gradient.device)
        rest = gradient.index_put([mask], zero) if ctx.needs_input_grad[0] else None
        return rest, None, _gradient(gradient, mask, ctx.shape)


@one_operator
def _gradient(gradient: torch.Tensor, mask: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Gradient of a value that was written."""
    if isinstance(gradient, FakeTensor) or gradient.is_meta:
        return gradient.new_empty(shape)
    return gradient[mask].sum_to_size(shape)
