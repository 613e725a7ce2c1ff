"""Dropout in split regions: shares of the pattern that one process draws, as many draws as it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from merak.core.mesh import Mesh
from merak.core.shards import ParameterShard, take
from merak.ops import collectives
from merak.ops.sharded_dropout import attend_sharded, dropout_by_mask, dropout_sharded

B, HEADS, T, SIZE = 2, 4, 5, 6


def on_rank(rank: int, degree: int, patch: pytest.MonkeyPatch) -> None:
    mesh = Mesh(1, degree, 1, rank, torch.device("cpu"), None)
    patch.setattr(collectives, "current_mesh", lambda: mesh)
    torch.manual_seed(7)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (3, 1, 0, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim,parts", [(1, (4,)), (3, (2, 4))])
def test_dropout_keeps_the_own_slice(
    dim: int,
    parts: tuple[int, ...],
    dtype: torch.dtype,
    order: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = [(B, HEADS, T, SIZE)[d] for d in order]
    back = [order.index(d) for d in range(4)]
    whole = torch.randn(memory, dtype=dtype).permute(back)
    torch.manual_seed(7)
    expected = torch.ops.aten.dropout(whole.contiguous(), 0.4, True)
    after = torch.rand(3)
    shard = ParameterShard(dim, parts, 2)
    for rank in range(2):
        on_rank(rank, 2, monkeypatch)
        share = take(whole.permute(order), ParameterShard(order.index(dim), parts, 2), rank)
        found = dropout_sharded(share.permute(back), 0.4, True, (dim, parts, "tp", 1))
        assert torch.equal(found, take(expected, shard, rank))
        assert torch.equal(torch.rand(3), after)


class Largest(TorchDispatchMode):
    """The largest storage that an operator makes."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.num_bytes = max(self.num_bytes, made.untyped_storage().nbytes())
        return made


def test_the_whole_pattern_takes_a_byte_an_element(monkeypatch: pytest.MonkeyPatch) -> None:
    on_rank(3, 8, monkeypatch)
    with Largest() as largest:
        dropout_sharded(torch.randn(B, 16, T), 0.4, True, (1, (128,), "tp", 1))
    assert largest.num_bytes == B * 128 * T


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_by_a_mask_keeps_the_own_slice(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = torch.randn(B, HEADS, T, SIZE, dtype=dtype)
    torch.manual_seed(7)
    expected, kept = torch.native_dropout(whole, 0.4, True)
    after = torch.rand(3)
    for rank in range(2):
        on_rank(rank, 2, monkeypatch)
        share = whole.chunk(2, dim=1)[rank].clone().requires_grad_()
        found = dropout_by_mask(share, 0.4, True, (1, (HEADS,), "tp", 1))
        assert torch.equal(torch.rand(3), after)
        torch.testing.assert_close(found, expected.chunk(2, dim=1)[rank])
        (mask,) = found.grad_fn.saved_tensors
        assert mask.untyped_storage().nbytes() == share.numel()
        found.sum().backward()
        own = kept.chunk(2, dim=1)[rank]
        torch.testing.assert_close(share.grad, (own / 0.6).to(dtype))


def test_dropout_that_drops_nothing_or_all(monkeypatch: pytest.MonkeyPatch) -> None:
    on_rank(0, 2, monkeypatch)
    x, layout = torch.randn(2, 4), (1, (8,), "tp", 1)
    assert dropout_sharded(x, 0.5, False, layout) is x
    assert dropout_sharded(x, 0.0, True, layout) is x
    assert torch.equal(dropout_sharded(x, 1.0, True, layout), torch.zeros(2, 4))


def masks(kind: str) -> torch.Tensor | None:
    if kind == "bool":
        mask = torch.rand(B, 1, T, T) > 0.3
        mask[0, :, 2] = False  # a query that sees nothing
        return mask
    return torch.randn(B, HEADS, T, T) if kind == "per head" else None


@pytest.mark.parametrize("kind", ["none", "causal", "bool", "per head"])
@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_keeps_the_own_heads(
    kind: str, kv_heads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    query = torch.randn(B, HEADS, T, SIZE, dtype=dtype)
    key, value = torch.randn(2, B, kv_heads, T, SIZE, dtype=dtype)
    mask = masks(kind)
    mask = mask.to(dtype) if mask is not None and mask.is_floating_point() else mask
    grouped = kv_heads != HEADS
    torch.manual_seed(7)
    expected = functional.scaled_dot_product_attention(
        query, key, value, mask, 0.3, kind == "causal", scale=0.5, enable_gqa=grouped
    )
    after = torch.rand(3)
    for rank in range(2):
        on_rank(rank, 2, monkeypatch)
        q, k, v = (t.chunk(2, dim=1)[rank] for t in (query, key, value))
        own = mask.chunk(2, dim=1)[rank] if mask is not None and mask.shape[1] > 1 else mask
        found = attend_sharded(
            q, k, v, own, 0.3, kind == "causal",
            scale=0.5, enable_gqa=grouped, layout=(1, (HEADS,), "tp", 1),
        )  # fmt: skip
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected.chunk(2, dim=1)[rank])
        assert torch.equal(torch.rand(3), after)


@pytest.mark.gpu
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_keeps_the_own_slice_on_a_gpu(
    dtype: torch.dtype, order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = [(B, 8, 33, 64)[d] for d in order]
    back = [order.index(d) for d in range(4)]
    whole = torch.randn(memory, dtype=dtype, device="cuda").permute(back)
    torch.manual_seed(7)
    expected = torch.ops.aten.dropout(whole.contiguous(), 0.4, True)
    after = torch.rand(3, device="cuda")
    for rank in range(4):
        on_rank(rank, 4, monkeypatch)
        share = whole.permute(order).chunk(4, dim=order.index(1))[rank].contiguous().permute(back)
        found = dropout_sharded(share, 0.4, True, (1, (8,), "tp", 1))
        torch.testing.assert_close(found, expected.chunk(4, dim=1)[rank])
        assert torch.equal(found == 0, expected.chunk(4, dim=1)[rank] == 0)
        assert torch.equal(torch.rand(3, device="cuda"), after)


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_draws_by_rank_on_a_gpu(
    dtype: torch.dtype, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, B, 2, 16, 64, dtype=dtype, device="cuda")
    value = torch.ones_like(key)
    mask = torch.ones(B, 1, 16, 16, dtype=torch.bool, device="cuda").tril() if masked else None
    results, draws = [], []
    for rank in (0, 1, 0):
        on_rank(rank, 2, monkeypatch)
        torch.rand(5, device="cuda")
        own = attend_sharded(
            query, key, value, mask, 0.3, not masked,
            scale=None, enable_gqa=False, layout=(1, (4,), "tp", 1),
        )  # fmt: skip
        results.append(own)
        draws.append(torch.rand(3, device="cuda"))
    assert torch.equal(results[0], results[2])
    assert not torch.equal(results[0], results[1])
    assert torch.equal(draws[0], draws[1])
    on_rank(0, 2, monkeypatch)
    torch.rand(5, device="cuda")
    assert not torch.equal(draws[0], torch.rand(3, device="cuda"))  # the numbers drawn are used up
