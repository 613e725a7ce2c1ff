"""Shares of tensors: every element is in one of them, and packing loses none."""

from __future__ import annotations

import pytest
import torch

from merak.engine.comm.row_shards import longest_shard, pack, pack_all, shard_rows, unpack


def tensors() -> list[torch.Tensor]:
    return [torch.randn(5, 3), torch.randn(()), torch.randn(1), torch.randn(7), torch.randn(2, 2)]


@pytest.mark.parametrize("degree", [1, 2, 3, 8])
def test_packed_shares_make_the_whole(degree: int) -> None:
    whole = tensors()
    copies = [torch.full_like(t, torch.nan) for t in whole]
    for index in range(degree):
        flat = pack(whole, degree, index)
        assert flat.numel() == longest_shard(whole, degree)
        unpack(flat, copies, degree, index)
    for tensor, copy in zip(whole, copies, strict=True):
        assert torch.equal(tensor, copy)


@pytest.mark.parametrize("degree", [1, 2, 3, 8])
def test_all_shares_lie_one_after_the_other(degree: int) -> None:
    whole = tensors()
    state = [pack(whole, degree, index) for index in range(degree)]
    assert torch.equal(pack_all(whole, degree), torch.cat(state))


def test_shares_differ_by_a_row_at_most() -> None:
    sizes = [shard_rows(torch.empty(11, 2), 4, i) for i in range(4)]
    assert {share.stop - share.start for share in sizes} == {2, 3}
    assert sizes[0].start == 0
    assert sizes[-1].stop == 11
