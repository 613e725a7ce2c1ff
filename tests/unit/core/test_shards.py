"""Shares of a parameter whose size the degree does not divide."""

import pytest
import torch

from merak.core.shards import ParameterShard, join, join_all, take, take_all


@pytest.mark.parametrize(
    "size,degree,ranges",
    [
        (7, 2, [(0, 4), (4, 7)]),
        (5, 4, [(0, 2), (2, 4), (4, 5), (5, 5)]),  # nothing is left for the last
        (8, 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
    ],
)
@pytest.mark.parametrize("dim", [0, 1])
def test_shares_are_filled_up_with_zeros(
    size: int, degree: int, ranges: list[tuple[int, int]], dim: int
) -> None:
    shard = ParameterShard(dim, (size,), degree)
    whole = torch.rand(size, 3) + 1
    whole = whole if dim == 0 else whole.T
    assert [shard.ranges(rank)[0] for rank in range(degree)] == ranges
    shares = [take(whole, shard, rank) for rank in range(degree)]
    for share, (start, stop) in zip(shares, ranges, strict=True):
        assert share.shape[dim] == -(-size // degree)
        assert torch.equal(
            share.narrow(dim, 0, stop - start), whole.narrow(dim, start, stop - start)
        )
        assert not share.narrow(dim, stop - start, share.shape[dim] - (stop - start)).any()
    assert torch.equal(join(shares, shard), whole)


@pytest.mark.parametrize("dim", [0, 1])
def test_what_one_rank_owns_is_empty_on_the_others(dim: int) -> None:
    shard, whole = ParameterShard(dim, (3,), 3, owner=1), torch.rand(3, 3)
    shares = [take(whole, shard, rank) for rank in range(3)]
    assert [shard.sizes(rank) for rank in range(3)] == [(0,), (3,), (0,)]
    assert [shard.ranges(rank) for rank in range(3)] == [((0, 0),), ((0, 3),), ((0, 0),)]
    assert [share.shape[dim] for share in shares] == [0, 3, 0]
    assert torch.equal(shares[1], whole)
    assert torch.equal(join(shares, shard), whole)


@pytest.mark.parametrize(
    "shard",
    [
        ParameterShard(0, (8,), 4),
        ParameterShard(1, (8,), 2),
        ParameterShard(2, (8,), 4),
        ParameterShard(1, (6, 2), 2),
        ParameterShard(1, (7,), 2),
        ParameterShard(1, (0,), 2),
        ParameterShard(1, (8,), 4, copies=2),
        ParameterShard(1, (6, 3), 3, whole=(1,)),
    ],
)
@pytest.mark.parametrize("leading", [1, 3])
def test_shards_of_all_ranks_at_once(shard: ParameterShard, leading: int) -> None:
    shape = [leading, 2, 3]
    shape[shard.dim] = sum(shard.parts)
    whole = torch.rand(shape)
    found = take_all(whole, shard)
    assert found.is_contiguous()
    each = [take(whole, shard, rank) for rank in range(shard.degree)]
    assert torch.equal(found, torch.stack(each))
    assert torch.equal(join_all(found, shard), whole)


def test_shards_that_lie_one_after_another_are_not_copied() -> None:
    whole, shard = torch.rand(1, 8, 3), ParameterShard(1, (8,), 4)
    found = take_all(whole, shard)
    assert found.data_ptr() == whole.data_ptr()
    assert join_all(found, shard).data_ptr() == whole.data_ptr()
