"""Attention inside the documents of packed rows.

A mask of causality and documents keeps queries from most keys, yet a kernel that reads a mask
multiplies them all. torch's attention of sequences of various lengths skips what is outside of a
document.
"""

from __future__ import annotations

import inspect

import torch
from torch.nn import functional

from merak.core.tensor_meta import TensorMeta

_Operand = torch.Tensor | TensorMeta

_LOW_PRECISION = (torch.float16, torch.bfloat16)
_MOST_FEATURES = 256
_MULTIPLE = 8
"""Of a head's features."""


def _has_varlen() -> bool:
    """Whether torch has the function, in the form that takes a window."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return "window_size" in inspect.signature(varlen_attn).parameters


_HAS_VARLEN = _has_varlen()  # not in a function that torch.compile may trace


def packed_obstacle(query: _Operand, key: _Operand, value: _Operand) -> str:
    """Obstacle to variable-length attention on a GPU, as a clause; "" for none.

    Args:
        query: (samples, heads, tokens, features), or its metadata.
        key: likewise.
        value: likewise.
    """
    if not _HAS_VARLEN:
        return f"torch {torch.__version__}"
    if query.dtype not in _LOW_PRECISION:
        return str(query.dtype).removeprefix("torch.")
    sizes = {x.shape[-1] for x in (query, key, value)}
    if len(sizes) > 1 or max(sizes) > _MOST_FEATURES or max(sizes) % _MULTIPLE:
        return f"heads of {' and '.join(map(str, sorted(sizes)))} features"
    if len(query.shape) != 4 or query.shape[:3] != key.shape[:3]:
        return f"queries of {tuple(query.shape)} over keys of {tuple(key.shape)}"
    return ""


def has_packed_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, device_type: str
) -> bool:
    """Whether torch has a kernel for the documents of packed rows: on GPUs from Ampere on.

    Args:
        query: as of `attend_packed`.
        key: likewise.
        value: likewise.
        device_type: of the device whose kernels run.
    """
    if device_type != "cuda" or packed_obstacle(query, key, value):
        return False
    is_real = query.is_cuda and torch.cuda.is_available()
    return not is_real or torch.cuda.get_device_capability(query.device) >= (8, 0)


def document_bounds(mask: torch.Tensor, room: int) -> torch.Tensor:
    """First tokens of all documents, then the number of tokens in every place that is left.

    Nothing waits for the device.

    Args:
        mask: (samples, 1, tokens, tokens), true where a query reads a key: its document's up to it.
        room: for the documents of all samples.

    Returns:
        (room + 1,), int32.
    """
    samples, _, tokens, _ = mask.shape
    # Only the first token of a document does not read the one before.
    follows = functional.pad(mask[:, 0].diagonal(-1, 1, 2), (1, 0))
    begins = ~follows.reshape(-1)
    numbers = torch.arange(samples * tokens, device=mask.device, dtype=torch.int32)
    places = torch.where(begins, begins.cumsum(0) - 1, room + 1)
    bounds = torch.full((room + 2,), samples * tokens, device=mask.device, dtype=torch.int32)
    return bounds.scatter(0, places, numbers)[: room + 1]


def attend_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    room: int,
    scale: float | None = None,
    enable_gqa: bool = False,
    device_type: str | None = None,
) -> torch.Tensor:
    """Attention whose mask is of causality and documents alone, by the best kernel there is.

    Args:
        query: (samples, heads, tokens, features).
        key: likewise.
        value: likewise.
        attn_mask: (samples, 1, tokens, tokens), true where a query reads a key.
        dropout_p: 0.
        is_causal: false, as the mask says it.
        room: for the documents of all samples.
        scale: of the scores; None for one over the root of the features.
        enable_gqa: whether several heads of queries may share a head of keys.
        device_type: of the device whose kernels run; None for that of the query.
    """
    if not has_packed_kernel(query, key, value, device_type or query.device.type):
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    from torch.nn.attention.varlen import varlen_attn

    samples, _, tokens, _ = query.shape
    bounds = document_bounds(attn_mask, room)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    found = varlen_attn(q, k, v, bounds, bounds, tokens, tokens, scale=scale, window_size=(-1, 0))
    assert isinstance(found, torch.Tensor)
    return found.view(samples, tokens, *found.shape[1:]).transpose(1, 2)
