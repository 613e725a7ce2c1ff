"""Attention over a ring of ranks: results and gradients are those of one process."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from merak.ops.attention.block import attend_block, block_gradients
from merak.ops.attention.ring import attend_ring
from tests.ranks_in_turns import RanksInTurns


def documents(tokens: int) -> torch.Tensor:
    """Which keys queries read that end with a document in the midst: none of the first ranks'."""
    places = torch.arange(tokens)
    begins = places >= tokens // 2 + 1
    return (places[:, None] >= places) & (begins[:, None] == begins)


def padded(tokens: int) -> torch.Tensor:
    """Under causality, with two tokens in front that nothing reads and that read nothing."""
    places = torch.arange(tokens)
    return (places[:, None] >= places) & (places >= 2)


def distances(tokens: int) -> torch.Tensor:
    """What is added to scores, for each of three heads."""
    places = torch.arange(tokens)
    return -torch.rand(3, 1, 1) * (places[:, None] - places).abs()


@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize(
    ("tokens", "is_causal", "mask", "kv_heads", "width"),
    [
        (4, True, None, 3, 8),  # an early and a late half of each rank
        (3, True, None, 1, 8),  # which an odd number has not
        (4, False, None, 3, 6),
        (4, False, documents, 1, 8),
        (4, False, padded, 3, 8),
        (3, False, distances, 3, 8),
    ],
)
def test_a_ring_is_one_process(
    degree: int, tokens: int, is_causal: bool, mask: object, kv_heads: int, width: int
) -> None:
    torch.manual_seed(0)
    total = degree * tokens
    sizes = ((3, 8), (kv_heads, 8), (kv_heads, width))
    whole = [torch.randn(2, heads, total, size, requires_grad=True) for heads, size in sizes]
    given = torch.randn(2, 3, total, width)
    bias = mask(total) if callable(mask) else None
    shares = {"enable_gqa": kv_heads != 3}
    one = functional.scaled_dot_product_attention(*whole, bias, is_causal=is_causal, **shares)
    one.backward(given)

    def run(rank: int) -> list[torch.Tensor]:
        rows = slice(rank * tokens, (rank + 1) * tokens)
        own = [x.detach()[:, :, rows].requires_grad_() for x in whole]
        rows_of_mask = None if bias is None else bias[..., rows, :]
        found = attend_ring(*own, rows_of_mask, None, is_causal, degree, "cp")
        found.backward(given[:, :, rows])
        return [found.detach(), *(x.grad for x in own)]  # type: ignore[list-item]

    ranks = RanksInTurns(degree, "cp").run(run)
    for found, expected in zip(zip(*ranks), (one.detach(), *(x.grad for x in whole)), strict=True):
        torch.testing.assert_close(torch.cat(found, 2), expected)


BLOCKS = [
    (torch.bfloat16, False, 64, 64, 4),  # flash attention
    (torch.bfloat16, False, 36, 20, 2),
    (torch.float32, False, 64, 64, 4),  # memory-efficient attention
    (torch.bfloat16, True, 64, 64, 1),
]


def block_of(
    dtype: torch.dtype, features: int, width: int, heads: int, device: str
) -> list[torch.Tensor]:
    sizes = ((4, 24, features), (heads, 40, features), (heads, 40, width))
    return [torch.randn(2, *size, device=device, dtype=dtype) for size in sizes]


@pytest.mark.parametrize(("dtype", "is_masked", "features", "width", "heads"), BLOCKS)
def test_kernels_of_gpus_give_what_the_block_has(
    dtype: torch.dtype, is_masked: bool, features: int, width: int, heads: int
) -> None:
    """Shapes alone, by torch's own metadata of its kernels."""
    operands = block_of(dtype, features, width, heads, "meta")
    mask = torch.ones(2, 1, 24, 40, dtype=torch.bool, device="meta") if is_masked else None
    out, normaliser = attend_block(*operands, mask, False, None)
    assert out.shape == (2, 4, 24, width) and normaliser.shape == (2, 4, 24)
    found = block_gradients(torch.empty_like(out), *operands, mask, out, normaliser, False, None)
    assert [x.shape for x in found] == [x.shape for x in operands]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "is_masked", "features", "width", "heads"), BLOCKS)
def test_kernels_of_a_gpu_are_those_of_a_cpu(
    dtype: torch.dtype, is_masked: bool, features: int, width: int, heads: int
) -> None:
    """In their own precision beside float64."""
    torch.manual_seed(0)
    exact = block_of(torch.float64, features, width, heads, "cpu")
    exact = [x.to(dtype).double() for x in exact]
    mask = torch.rand(2, 1, 24, 40) > 0.3 if is_masked else None
    expected = attend_block(*exact, mask, False, None)
    gradient = torch.randn(expected[0].shape).to(dtype).double()
    expected += block_gradients(gradient, *exact, mask, *expected, False, None)
    own = [x.to("cuda", dtype) for x in exact]
    own_mask = None if mask is None else mask.cuda()
    found = attend_block(*own, own_mask, False, None)
    found += block_gradients(gradient.to("cuda", dtype), *own, own_mask, *found, False, None)
    for one, right in zip(found, expected, strict=True):
        assert (one.cpu().double() - right).norm() < 1e-2 * right.norm()
