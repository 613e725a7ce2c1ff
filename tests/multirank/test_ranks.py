import os

import pytest
import torch
import torch.distributed as dist

import merak
from tests.multirank.ranks import RankError, RankPool


def sum_over_tp(value: float) -> tuple[int, float]:
    grid = merak.init(tp=dist.get_world_size(), device="cpu")
    total = torch.tensor([value + grid.tp_rank])
    if grid.group("tp") is not None:
        dist.all_reduce(total, group=grid.group("tp"))
    return os.getpid(), total.item()


def raise_on_rank(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} has a reason")
    dist.all_reduce(torch.zeros(1))


def test_ranks_are_reused_under_every_world_size(pool: RankPool) -> None:
    two = pool.run(sum_over_tp, 2, 10.0)
    four = pool.run(sum_over_tp, 4, 10.0)
    one = pool.run(sum_over_tp, 1, 10.0)
    assert [total for _, total in two] == [21.0, 21.0]
    assert [total for _, total in four] == [46.0] * 4
    assert [total for _, total in one] == [10.0]
    pids = [pid for pid, _ in four]
    assert len(set(pids)) == 4
    assert [pid for pid, _ in two] == pids[:2]
    assert [pid for pid, _ in one] == pids[:1]


def test_an_exception_comes_back_and_the_pool_recovers(pool: RankPool) -> None:
    with pytest.raises(RankError, match="ValueError: rank 1 has a reason"):
        pool.run(raise_on_rank, 2, 1)
    assert [total for _, total in pool.run(sum_over_tp, 2, 0.0)] == [1.0, 1.0]
