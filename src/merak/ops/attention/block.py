"""Attention of some queries over some keys, with what merges it with attention over others.

torch's own fused kernels, below their autograd: each gives the logarithm of every query's sum of
exponentials beside the result, and its backward takes that of all keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from merak.ops.attention.packed import repeat_heads

aten = torch.ops.aten

_MULTIPLE = 8
"""Of a head's features, to which they are padded with zeros."""

_MOST_FEATURES = 256
"""Of a head, in flash attention."""

_ALIGNED = 16
"""Keys of which a row of a mask has a multiple, in memory-efficient attention."""

_ROWS = 32
"""Queries to a multiple of which that pads what it gives of each."""

Block = tuple[torch.Tensor, torch.Tensor]
"""The result, (samples, heads, queries, features of the values), and the logarithm of each query's
sum of exponentials, (samples, heads, queries), −∞ where it sees no key."""


def attend_block(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> Block:
    """Attention of queries over keys.

    Args:
        query: (samples, heads, queries, features).
        key: (samples, heads or fewer that queries share, keys, features).
        value: likewise; its features may be others.
        mask: broadcasts to (samples, heads, queries, keys): true where a query sees a key, or what
            is added to scores.
        is_causal: whether a query sees no later keys, without a mask.
        scale: of the scores; None for one over the root of the features.
    """
    operands = _Operands(query, key, value, mask, scale)
    found: Block = operands.kernel.forward(operands, is_causal)
    out, normaliser = found
    if mask is not None:
        sees = mask if mask.dtype == torch.bool else mask > -torch.inf
        normaliser = normaliser.masked_fill(~sees.any(-1), -torch.inf)
    return out[..., : value.shape[-1]], normaliser


def block_gradients(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    out: torch.Tensor,
    normaliser: torch.Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of a block's queries, keys and values.

    Args:
        gradient: of the result over all keys.
        query: as of `attend_block`, as the further ones are.
        key: of the block.
        value: of the block.
        mask: of the block.
        out: the result over all keys.
        normaliser: over all keys.
        is_causal: without a mask.
        scale: of the scores.
    """
    operands = _Operands(query, key, value, mask, scale)
    both = operands.padded(gradient), operands.padded(out)
    made = operands.kernel.backward(operands, *both, normaliser, is_causal)
    of_query, of_key, of_value = made[:3]
    shared = query.shape[1] // key.shape[1]
    if shared > 1:
        of_key, of_value = (x.unflatten(1, (-1, shared)).sum(2) for x in (of_key, of_value))
    size, width = query.shape[-1], value.shape[-1]
    return of_query[..., :size], of_key[..., :size], of_value[..., :width]


class _Operands:
    """A block's tensors as kernels take them: as many heads of keys, and features, as of queries.

    Args:
        query: as of `attend_block`, as the further ones are.
        key: of the block.
        value: of the block.
        mask: of the block.
        scale: of the scores.
    """

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
    ) -> None:
        most = max(query.shape[-1], value.shape[-1])
        self.features = most if query.device.type == "cpu" else most + -most % _MULTIPLE
        self.query = self.padded(query)
        self.key, self.value = (self.padded(repeat_heads(x, query, True)) for x in (key, value))
        self.scale = query.shape[-1] ** -0.5 if scale is None else scale
        self.bias = None if mask is None else _bias(mask, query)
        self.kernel: Any = _OnCpu
        if query.device.type != "cpu":
            is_low = query.dtype in (torch.float16, torch.bfloat16)
            takes = mask is None and is_low and self.features <= _MOST_FEATURES
            self.kernel = _Flash if takes else _Efficient

    def padded(self, tensor: torch.Tensor) -> torch.Tensor:
        """With zeros for the features that it lacks."""
        lacks = self.features - tensor.shape[-1]
        return functional.pad(tensor, (0, lacks)) if lacks else tensor


def _bias(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """What a mask adds to scores, with a dim for samples and for heads."""
    bias = mask
    if mask.dtype == torch.bool:
        bias = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
    return bias.to(query.dtype).view((1,) * (4 - bias.dim()) + bias.shape)


class _OnCpu:
    @staticmethod
    def forward(own: _Operands, is_causal: bool) -> Block:
        found: Block = aten._scaled_dot_product_flash_attention_for_cpu(
            own.query, own.key, own.value, 0.0, is_causal, attn_mask=own.bias, scale=own.scale
        )
        return found

    @staticmethod
    def backward(own: _Operands, gradient: Any, out: Any, normaliser: Any, is_causal: bool) -> Any:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, own.query, own.key, own.value, out, normaliser, 0.0, is_causal,
            attn_mask=own.bias, scale=own.scale,
        )  # fmt: skip


class _Flash:
    @staticmethod
    def forward(own: _Operands, is_causal: bool) -> Block:
        found = aten._scaled_dot_product_flash_attention(
            own.query, own.key, own.value, 0.0, is_causal, scale=own.scale
        )
        return found[0], found[1]

    @staticmethod
    def backward(own: _Operands, gradient: Any, out: Any, normaliser: Any, is_causal: bool) -> Any:
        seed = own.query.new_zeros(2, dtype=torch.uint64)  # without dropout, nothing reads them
        offset = own.query.new_zeros((), dtype=torch.uint64)
        lengths = own.query.shape[-2], own.key.shape[-2]
        return aten._scaled_dot_product_flash_attention_backward(
            gradient, own.query, own.key, own.value, out, normaliser.contiguous(), None, None,
            *lengths, 0.0, is_causal, seed, offset, scale=own.scale,
        )  # fmt: skip


class _Efficient:
    @staticmethod
    def forward(own: _Operands, is_causal: bool) -> Block:
        found = aten._scaled_dot_product_efficient_attention(
            own.query, own.key, own.value, _Efficient._bias(own), True, 0.0, is_causal,
            scale=own.scale,
        )  # fmt: skip
        return found[0], found[1][..., : own.query.shape[-2]]

    @staticmethod
    def backward(own: _Operands, gradient: Any, out: Any, normaliser: Any, is_causal: bool) -> Any:
        nothing = own.query.new_zeros((), dtype=torch.int64)
        lacks = -normaliser.shape[-1] % _ROWS
        padded = functional.pad(normaliser, (0, lacks), value=torch.inf)
        return aten._scaled_dot_product_efficient_attention_backward(
            gradient, own.query, own.key, own.value, _Efficient._bias(own), out, padded, nothing,
            nothing, 0.0, (True, True, True, False), is_causal, scale=own.scale,
        )  # fmt: skip

    @staticmethod
    def _bias(own: _Operands) -> torch.Tensor | None:
        """Rows of a mask lie where the kernel can read them."""
        if own.bias is None:
            return None
        queries, keys = own.query.shape[-2], own.key.shape[-2]
        shape = (*own.query.shape[:2], queries, keys)
        padded = functional.pad(own.bias.expand(*own.bias.shape[:-1], keys), (0, -keys % _ALIGNED))
        return padded[..., :keys].expand(shape)
