"""Grouped products in a trace: fake ones of other types than bfloat16, which torch refuses."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from merak.ops.grouped_product import grouped_mm_fallback


class GroupedProducts(TorchFunctionMode):
    """Function mode that records grouped products of float32 as transformers' operator.

    `torch.nn.functional.grouped_mm` takes them on devices, but bfloat16 alone on fake tensors.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record a product of rows in groups with one weight each; others are torch's own."""
        kwargs = kwargs or {}
        if func is torch._grouped_mm:
            operands = _operands(*args, **kwargs)
            if operands is not None:
                return grouped_mm_fallback()(*operands)
        return func(*args, **kwargs)


def _operands(
    rows: torch.Tensor,
    weight: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Rows (rows, in), weights (groups, in, out) and offsets (groups,); None for other products."""
    if not isinstance(rows, FakeTensor) or rows.dtype is torch.bfloat16:
        return None
    if (rows.ndim, weight.ndim) != (2, 3) or offs is None or bias is not None:
        return None
    is_plain = rows.dtype == weight.dtype and out_dtype in (None, rows.dtype)
    return (rows, weight, offs) if is_plain else None
