"""Attention inside the documents of packed rows.

A mask of causality and documents keeps queries from most keys, yet a kernel that reads a mask
multiplies them all. torch's attention of sequences of various lengths skips what is outside of a
document. What that does not take (float32, more than 256 features, GPUs before Ampere) reads the
mask: torch's FlexAttention is fused only where Inductor compiles it, in eager code holds every
score, and on CPUs has no backward.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.nn import functional

from merak.core.tensor_meta import TensorMeta

_Operand = torch.Tensor | TensorMeta

_LOW_PRECISION = (torch.float16, torch.bfloat16)
_MOST_FEATURES = 256
_MULTIPLE = 8
"""Of a head's features, to which they are padded with zeros."""


def _arguments() -> frozenset[str]:
    """Arguments of torch's function; none where there is none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


_ARGUMENTS = _arguments()  # not in a function that torch.compile may trace


def packed_obstacle(query: _Operand, key: _Operand, value: _Operand) -> str:
    """Obstacle to variable-length attention on a GPU, as a clause; "" for none.

    Args:
        query: (samples, heads, tokens, features), or its metadata.
        key: likewise.
        value: likewise.
    """
    if "window_size" not in _ARGUMENTS:
        return f"torch {torch.__version__}"
    if query.dtype not in _LOW_PRECISION:
        return str(query.dtype).removeprefix("torch.")
    if (most := max(x.shape[-1] for x in (query, key, value))) > _MOST_FEATURES:
        return f"heads of {most} features"
    sizes = [(*x.shape[:1], *x.shape[2:3]) for x in (query, key)]
    if len(query.shape) != 4 or sizes[0] != sizes[1] or query.shape[1] % key.shape[1]:
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


def repeat_heads(x: torch.Tensor, query: torch.Tensor, enable_gqa: bool) -> torch.Tensor:
    """Keys or values with a head for each of the query's, for kernels that share none.

    On a GPU, kernels that take a mask are among these: with shared heads torch multiplies matrices.

    Args:
        x: keys or values, (…, heads, tokens, features).
        query: likewise.
        enable_gqa: whether several heads of queries share one of `x`.
    """
    if not enable_gqa or x.shape[-3] == query.shape[-3]:
        return x
    return x.repeat_interleave(query.shape[-3] // x.shape[-3], dim=-3)


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
    """Attention with a mask, often of causality and documents alone, by the best kernel there is.

    Args:
        query: (samples, heads, tokens, features).
        key: likewise; of fewer heads that queries share, which torch 2.11 gets repeated.
        value: as the key, whose features may be others than the query's.
        attn_mask: (samples, 1, tokens, tokens), true where a query reads a key.
        dropout_p: 0.
        is_causal: false, as the mask says it.
        room: for the documents of all samples; 0 for any other mask.
        scale: of the scores; None for one over the root of the features.
        enable_gqa: whether several heads of queries may share a head of keys.
        device_type: of the device whose kernels run; None for that of the query.
    """
    device_type = device_type or query.device.type
    is_packed = room > 0 and has_packed_kernel(query, key, value, device_type)
    takes_groups = is_packed and "enable_gqa" in _ARGUMENTS
    shares: dict[str, Any] = {"enable_gqa": enable_gqa} if takes_groups else {}
    if not shares and (is_packed or device_type != "cpu"):
        key, value = (repeat_heads(x, query, enable_gqa) for x in (key, value))
    if not is_packed:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    from torch.nn.attention.varlen import varlen_attn

    samples, _, tokens, size = query.shape
    width, most = value.shape[-1], max(size, value.shape[-1])
    most += -most % _MULTIPLE
    bounds = document_bounds(attn_mask, room)
    q, k, v = (
        functional.pad(x, (0, most - x.shape[-1])).transpose(1, 2).flatten(0, 1)
        for x in (query, key, value)
    )
    scale = size**-0.5 if scale is None else scale
    found = varlen_attn(
        q, k, v, bounds, bounds, tokens, tokens, scale=scale, window_size=(-1, 0), **shares
    )
    assert isinstance(found, torch.Tensor)
    return found.view(samples, tokens, *found.shape[1:]).transpose(1, 2)[..., :width]
