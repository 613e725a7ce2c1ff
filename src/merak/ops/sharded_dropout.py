"""Dropout in sharded regions: every rank keeps its own slice of the unsharded model's mask.

Every tensor parallel rank is seeded alike, draws the pattern of the whole tensor and keeps its own
slice; so all of them also consume the same random numbers as one device does.

The exception is attention with dropout on a GPU: its fused kernels draw inside, so there each rank
draws for its own heads from a generator keyed by its position, and the pattern, though as random,
depends on the tensor parallel degree.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from merak.core.random import seed_for
from merak.core.shards import ParameterShard, take
from merak.ops.attention.packed import attend_packed, repeat_heads
from merak.ops.collectives import axis_degree, axis_rank
from merak.ops.recording import one_operator

Layout = tuple[int, tuple[int, ...], str, int]
"""(dim, parts, axis) of a split tensor, as for `merak.ops.collectives.gather_from`, and how many
consecutive ranks hold the same shard."""

Rows = tuple[int, int, int]
"""(dim, start, size of the whole) of what a sub-microbatch has of a tensor."""


def dropout_sharded(
    x: torch.Tensor,
    p: float,
    train: bool,
    layout: Layout | None,
    rows: Rows | None = None,
) -> torch.Tensor:
    """Dropout of a sharded tensor, with the rank's slice of the full tensor's mask.

    Args:
        x: the rank's shard, of any shape.
        p: probability that an element is zeroed.
        train: whether to drop at all.
        layout: how the whole is split over ranks; None where it is not.
        rows: which samples of the microbatch they are, where not all.

    Returns:
        The shard after dropout.
    """
    if train and 0.0 < p < 1.0 and x.numel() and x.device.type == "cpu":
        return x * _noise_slice(x, p, layout, rows)
    return dropout_by_mask(x, p, train, layout, rows)


def dropout_by_mask(
    x: torch.Tensor,
    p: float,
    train: bool,
    layout: Layout | None,
    rows: Rows | None = None,
) -> torch.Tensor:
    """`dropout_sharded` that saves a boolean mask for its backward, as torch's does on a GPU.

    Arguments are those of `dropout_sharded`.
    """
    if not train or p == 0.0 or x.numel() == 0:
        return x
    if p == 1.0:
        return x * torch.zeros_like(x)
    whole, own = _whole_like(x, layout, rows)
    kept = own(torch.native_dropout(whole, p, True)[1]).clone()  # not all of the whole is saved
    found: torch.Tensor = _Dropout.apply(x, kept, 1 / (1 - p))  # type: ignore[no-untyped-call]
    return found


class _Dropout(torch.autograd.Function):
    """Product of a tensor with a mask and a number; the mask alone is saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kept: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(kept)
        ctx.scale = scale
        return torch.ops.aten.native_dropout_backward(x, kept, scale)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (kept,) = ctx.saved_tensors
        return torch.ops.aten.native_dropout_backward(gradient, kept, ctx.scale), None, None


def attend_sharded(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None,
    enable_gqa: bool,
    layout: Layout | None,
    kv_whole: bool = False,
    rows: Rows | None = None,
    room: int = 0,
) -> torch.Tensor:
    """Scaled-dot-product attention with dropout over the rank's own heads.

    Its arguments are those of torch's own, hence their number.

    On the CPU the pattern is the own slice of the one that the whole attention would get; on a GPU
    it is drawn inside the fused kernel from a generator keyed by the rank's position.

    Args:
        query: (…, heads of this rank, sequence, head size).
        key: (…, heads or kv-heads of this rank, sequence, head size).
        value: like `key`.
        attn_mask: boolean or added to the scores; broadcasts to (…, heads, sequence, sequence).
        dropout_p: probability that an attention weight is zeroed.
        is_causal: whether a position sees only itself and those before.
        scale: factor of the scores; 1/√(head size) if None.
        enable_gqa: whether several query heads share a kv-head.
        layout: how the heads are split over ranks; None where they are not.
        kv_whole: whether `key` and `value` hold all kv-heads of the model, which are too few to
            split; those that the rank's queries read are picked.
        rows: which samples of the microbatch they are, where not all.
        room: as of `attend_packed`.

    Returns:
        The attention's result, shaped like `query`.
    """
    is_drawn_inside = dropout_p and _draws_inside(query.device)
    if dropout_p and not is_drawn_inside:
        if kv_whole:
            assert layout is not None
            key, value = (_heads_for(query, x, layout) for x in (key, value))
        weights = _attention_weights(query, key, attn_mask, is_causal, scale, enable_gqa)
        dropped = weights * _noise_slice(weights, dropout_p, layout, rows)
        return (dropped @ repeat_heads(value, query, enable_gqa).to(dropped.dtype)).to(query.dtype)
    if is_drawn_inside:
        use_rank_seed(query, layout, rows)
    found = attend_by_kernel(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
        enable_gqa=enable_gqa, layout=layout, kv_whole=kv_whole, room=room,
    )  # fmt: skip
    if is_drawn_inside:
        use_shared_seed(query)
    return found


def attend_by_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None,
    enable_gqa: bool,
    layout: Layout | None,
    kv_whole: bool = False,
    rows: Rows | None = None,
    room: int = 0,
) -> torch.Tensor:
    """Attention over the rank's own heads with a pattern that torch's kernel draws.

    Arguments are those of `attend_sharded`.
    """
    if kv_whole:
        assert layout is not None
        key, value = (_heads_for(query, x, layout) for x in (key, value))
    if attn_mask is not None and not dropout_p:
        return attend_packed(
            query, key, value, attn_mask, room=room, scale=scale, enable_gqa=enable_gqa
        )
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _draws_inside(device: torch.device) -> bool:
    """Whether attention's kernels draw their dropout, where nobody can take a slice of it."""
    return device.type != "cpu"


@one_operator
def use_rank_seed(query: torch.Tensor, layout: Layout | None, rows: Rows | None) -> tuple[()]:
    """Seed a GPU's generator by the rank's position, for the dropout that its attention draws.

    Args:
        query: of the attention that draws.
        layout: how its heads are split over ranks; None where they are not.
        rows: which samples of the microbatch they are, where not all.
    """
    if not isinstance(query, FakeTensor):
        generator = _generator(query.device)
        seed, offset = _SHARED[query.device] = generator.initial_seed(), generator.get_offset()
        position = axis_rank(layout[2]) // layout[3] if layout is not None else 0
        start = rows[1] if rows is not None else 0
        generator.manual_seed(seed_for(seed, offset, "attention", position, start))
    return ()


@one_operator
def use_shared_seed(query: torch.Tensor) -> tuple[()]:
    """Restore a GPU's generator to what all ranks share, advanced by as much as attention drew.

    Args:
        query: of the attention that has drawn.
    """
    if not isinstance(query, FakeTensor):
        generator = _generator(query.device)
        seed, offset = _SHARED[query.device]
        used = generator.get_offset()
        generator.manual_seed(seed)
        generator.set_offset(offset + used)
    return ()


_SHARED: dict[torch.device, tuple[int, int]] = {}
"""Seed and offset of generators that a rank has seeded for itself."""


def _generator(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[device.index or 0]


def _attention_weights(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Attention weights as torch's unfused attention computes them, in fp32 for half precision."""
    key = repeat_heads(key, query, enable_gqa)
    if query.dtype in (torch.float16, torch.bfloat16):
        query, key = query.float(), key.float()
    root = math.sqrt(1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    scores = (query * root) @ (key * root).transpose(-2, -1)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(mask.logical_not(), -math.inf)
    elif mask is not None:
        scores = scores + mask
    weights: torch.Tensor = torch.ops.aten._safe_softmax(scores, -1)
    return weights


def _heads_for(query: torch.Tensor, x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """kv-heads that the rank's query heads read, one for each."""
    shard = _shard(layout)
    repeats = query.shape[shard.dim] * shard.num_shards // x.shape[shard.dim]
    return take(x.repeat_interleave(repeats, shard.dim), shard, axis_rank(layout[2]))


def _shard(layout: Layout) -> ParameterShard:
    dim, parts, axis, copies = layout
    return ParameterShard(dim, parts, axis_degree(axis), copies=copies)


def _noise_slice(
    like: torch.Tensor, p: float, layout: Layout | None, rows: Rows | None
) -> torch.Tensor:
    """Factors of the shard's elements on the CPU, 0 or 1/(1 − p), as torch's dropout draws them.

    The whole is drawn in booleans, a byte an element: which are drawn depends on no type.
    """
    whole, own = _whole_like(like, layout, rows, torch.bool)
    return own(whole.bernoulli_(1 - p)).to(like.dtype).div(1 - p)


def _whole_like(
    x: torch.Tensor, layout: Layout | None, rows: Rows | None, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """A contiguous tensor of all that a shard is of, and what takes the shard of its like.

    So draws are in logical order, as those of unsharded values are (`graph/program/codegen.py`).
    """
    sizes = list(x.shape)
    if layout is not None:
        shard = _shard(layout)
        sizes[shard.dim] *= shard.num_shards
    if rows is not None:
        sizes[rows[0]] = rows[2]
    whole = x.new_empty(sizes, dtype=dtype)

    def own(drawn: torch.Tensor) -> torch.Tensor:
        if rows is not None:
            drawn = drawn.narrow(rows[0], rows[1], x.shape[rows[0]])
        return drawn if layout is None else take(drawn, shard, axis_rank(layout[2]))

    return whole, own
