"""Shares of tensors: every element is in one of them, and packing loses none."""

from __future__ import annotations

import pytest
import torch

from merak.core.shards import row_shard
from merak.engine.comm.row_shards import pack, pack_all, packed_length, unpack, unpack_all


def tensors() -> list[torch.Tensor]:
    shapes: list[tuple[int, ...]] = [(5, 3), (), (1,), (7,), (2, 2), (0, 3), (8, 2)]
    transposed = torch.randn(3, 8).t()
    return [*(torch.randn(shape) for shape in shapes), transposed]


@pytest.mark.parametrize("degree", [1, 2, 3, 8])
def test_packed_shares_make_the_whole(degree: int) -> None:
    whole = tensors()
    copies = [torch.full_like(t, torch.nan) for t in whole]
    flats = [pack(whole, degree, index) for index in range(degree)]
    assert {flat.numel() for flat in flats} == {packed_length(whole, degree)}
    unpack_all(torch.cat(flats), copies, degree)
    for number, (tensor, copy) in enumerate(zip(whole, copies, strict=True)):
        assert torch.equal(tensor, copy)
        shares = [unpack(flat, whole, degree, i)[number] for i, flat in enumerate(flats)]
        assert torch.equal(torch.cat(shares), tensor if tensor.dim() else tensor.view(1))


@pytest.mark.parametrize("degree", [1, 2, 3, 8])
def test_all_shares_lie_one_after_the_other(degree: int) -> None:
    whole = tensors()
    state = [pack(whole, degree, index) for index in range(degree)]
    assert torch.equal(pack_all(whole, degree), torch.cat(state))
    assert torch.equal(pack_all(whole, degree, torch.float64), torch.cat(state).double())


@pytest.mark.parametrize("count", [1, 3, 11, 12])
def test_shares_are_the_chunks_of_torch(count: int) -> None:
    chunks = torch.arange(count).chunk(4)
    for index in range(4):
        rows = row_shard((count, 2), 4, index)
        own = chunks[index].tolist() if index < len(chunks) else []
        assert list(range(rows.start, rows.stop)) == own
