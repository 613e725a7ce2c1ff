"""Products of rows in groups, each group with a weight of its own, as experts multiply.

torch's kernel reads the groups' sizes on the device. Where it cannot multiply, each group is
multiplied by itself, for which the host reads the sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

_MULTIPLE = 8
"""Of sizes and strides, in bfloat16: the kernel reads 16 bytes at once."""


def grouped_product(
    rows: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    device_type: str | None = None,
) -> torch.Tensor:
    """Product of rows in groups; rows behind the last group give zeros.

    Args:
        rows: (rows, inputs).
        weight: (groups, inputs, outputs), of the same element type.
        offsets: (groups,), the row after the last one of every group.
        device_type: of the device whose kernels run; None for that of the rows.

    Returns:
        (rows, outputs); the gradient of rows behind the last group is zero too.
    """
    if has_kernel(rows, weight, device_type or rows.device.type):
        return product_by_kernel(rows, weight, offsets)
    result: torch.Tensor = grouped_mm_fallback()(rows, weight, offsets)
    return result


@cache
def grouped_mm_fallback() -> Callable[..., torch.Tensor]:
    """transformers' operator that multiplies group by group, whose backward is an operator too.

    Earlier versions read the groups' sizes in the backward itself, which fake tensors have not.
    """
    import transformers.integrations.moe  # noqa: F401  # registers the operator

    operators = torch.ops.transformers
    if not hasattr(operators, "grouped_mm_fallback_backward"):
        made = torch.library.custom_op(
            "transformers::grouped_mm_fallback_backward", _gradients, mutates_args=()
        )
        made.register_fake(
            lambda rows, weight, *_: (torch.empty_like(rows), torch.empty_like(weight))
        )
        torch.library.register_autograd(
            "transformers::grouped_mm_fallback", _backward, setup_context=_save
        )
    found: Callable[..., torch.Tensor] = operators.grouped_mm_fallback
    return found


def _save(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    found = torch.ops.transformers.grouped_mm_fallback_backward(*ctx.saved_tensors, gradient)
    return *found, None


def _gradients(
    rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the rows and of the weights of `grouped_mm_fallback`."""
    of_rows, of_weight, start = torch.zeros_like(rows), torch.zeros_like(weight), 0
    for group, end in enumerate(offsets.tolist()):
        if start != end:
            torch.mm(gradient[start:end], weight[group].T, out=of_rows[start:end])
            torch.mm(rows[start:end].T, gradient[start:end], out=of_weight[group])
        start = end
    return of_rows, of_weight


def has_kernel(rows: torch.Tensor, weight: torch.Tensor, device_type: str) -> bool:
    """Whether torch multiplies groups by one kernel: in bfloat16, from Ampere on, aligned."""
    if device_type != "cuda" or {rows.dtype, weight.dtype} != {torch.bfloat16}:
        return False
    # Without a GPU, tensors are fake, of a job on devices that are planned for.
    is_real = rows.is_cuda and torch.cuda.is_available()
    if is_real and torch.cuda.get_device_capability(rows.device) < (8, 0):
        return False
    widths = weight.shape[1:]
    return all(width % _MULTIPLE == 0 for width in widths) and all(map(_is_aligned, (rows, weight)))


def _is_aligned(tensor: torch.Tensor) -> bool:
    strides, is_placed = sorted(tensor.stride()[-2:]), tensor.storage_offset() % _MULTIPLE == 0
    return is_placed and strides[0] == 1 and strides[1] % _MULTIPLE == 0


def product_by_kernel(
    rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """`grouped_product` by torch's kernel, which leaves rows behind the last group unwritten."""
    place = torch.arange(rows.shape[0], device=rows.device)
    others = (place >= offsets.select(0, -1)).unsqueeze(1)  # in both passes
    own = torch._grouped_mm(rows.masked_fill(others, 0), weight, offs=offsets.to(torch.int32))
    return own.masked_fill(others, 0)
