"""Kernels that a GPU runs, for fake tensors on a machine without one.

Without torch's own part for GPUs, fake tensors are on the CPU, where attention and dropout choose
other kernels, which save other tensors for the backward. Here they choose as on a GPU. The choice
of attention is that of torch for GPUs from the Ampere generation on.

Source: `priority_order` and the constraints of aten/src/ATen/native/transformers/cuda/sdp_utils.cpp
in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from merak.graph.segment.cut import copy_graph
from merak.ops.sharded_dropout import (
    attend_by_kernel,
    attend_sharded,
    dropout_by_mask,
    dropout_sharded,
)

_aten = torch.ops.aten

_LOW_PRECISION = (torch.float16, torch.bfloat16)
_MOST_FEATURES = 256
"""Of a head, in flash attention."""
_ALIGNED_BYTES = 16
"""Of a row of memory-efficient attention's operands, and of its mask's in elements."""


def kernels_of(device_type: str, fake: torch.device) -> AbstractContextManager[object]:
    """Context in which operators on fake tensors choose the kernels of a type of device.

    Args:
        device_type: "cpu" or "cuda".
        fake: the device of the fake tensors.
    """
    return _GpuKernels() if (device_type, fake.type) == ("cuda", "cpu") else nullcontext()


def graph_of(graph: fx.Graph, device_type: str, fake: torch.device) -> fx.Graph:
    """Graph whose own operators of Merak choose the kernels of a type of device, too.

    Args:
        graph: of a segment; left as it is.
        device_type: "cpu" or "cuda".
        fake: the device of the fake tensors.
    """
    is_other = (device_type, fake.type) == ("cuda", "cpu")
    if not is_other or not any(node.target in _ON_GPUS for node in graph.nodes):
        return graph
    copy, _ = copy_graph(graph)
    for node in copy.nodes:
        node.target = _ON_GPUS.get(node.target, node.target)
    return copy


_ON_GPUS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {attend_sharded: attend_by_kernel, dropout_sharded: dropout_by_mask}
)
"""What operators of Merak do on a GPU, where they do something else on the CPU."""


class _GpuKernels(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return _KERNELS.get(func, func)(*args, **(kwargs or {}))


def _dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Dropout that saves a boolean mask, where the CPU saves one of the input's element type."""
    if not train or not 0 < p < 1:
        return _aten.dropout.default(x, p, train)  # type: ignore[no-any-return]
    return _aten.native_dropout.default(x, p, True)[0]  # type: ignore[no-any-return]


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention by the first kernel that takes its operands: flash, memory-efficient, or none."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if _is_flash(query, key, value, attn_mask):
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if _is_efficient(query, key, value, enable_gqa):
        needs_grad = any(x.requires_grad for x in (query, key, value))
        found = _aten._scaled_dot_product_efficient_attention.default(
            query,
            key,
            value,
            _bias(query, key, attn_mask),
            needs_grad and torch.is_grad_enabled(),
            dropout_p,
            is_causal,
            scale=scale,
        )
        return found[0]  # type: ignore[no-any-return]
    found = _aten._scaled_dot_product_attention_math.default(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return found[0]  # type: ignore[no-any-return]


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float,
) -> torch.Tensor:
    """Flash attention; heads whose size is no multiple of 8 are padded, and the result cut."""
    flash = _aten._scaled_dot_product_flash_attention.default
    size = query.shape[-1]
    if size % 8 == 0:
        return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]
    padded = [functional.pad(x, (0, -size % 8)) for x in (query, key, value)]
    return flash(*padded, dropout_p, is_causal, scale=scale)[0][..., :size]  # type: ignore[no-any-return]


def _is_flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> bool:
    sizes = {x.shape[-1] for x in (query, key, value)}
    fits = len(sizes) == 1 and max(sizes) <= _MOST_FEATURES and query.ndim == 4
    return mask is None and query.dtype in _LOW_PRECISION and fits


def _is_efficient(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> bool:
    grouped = enable_gqa and query.shape[-3] != key.shape[-3]
    rows = (query.shape[-1], value.shape[-1])
    aligned = all(size * query.dtype.itemsize % _ALIGNED_BYTES == 0 for size in rows)
    known = query.dtype in (torch.float32, *_LOW_PRECISION)
    return known and aligned and query.ndim == 4 and not grouped


def _bias(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
    """What is added to the scores: of the query's element type, with rows that are aligned."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        zeros = torch.zeros(mask.shape, dtype=query.dtype, device=query.device)
        mask = zeros.masked_fill(~mask, -torch.inf)
    num_keys = key.shape[-2]
    if mask.shape[-1] % _ALIGNED_BYTES:
        mask = functional.pad(mask, (0, -mask.shape[-1] % _ALIGNED_BYTES))[..., :num_keys]
    return mask.expand(*query.shape[:2], query.shape[-2], num_keys)


_KERNELS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        _aten.dropout.default: _dropout,
        _aten.scaled_dot_product_attention.default: _attention,
        functional.scaled_dot_product_attention: _attention,
    }
)
