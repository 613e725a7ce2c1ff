"""Rows of a rank's part of a parameter: where they lie in the whole."""

from __future__ import annotations

import pytest
import torch

from merak.checkpoint.shards import row_shard_of
from merak.core.shards import ParameterShard, RowShard, take


@pytest.mark.parametrize(
    "shard",
    [None, ParameterShard(0, (8,), 2), ParameterShard(1, (4,), 2), ParameterShard(0, (4, 2, 2), 2)],
)
def test_rows_of_all_ranks_make_the_whole(shard: ParameterShard | None) -> None:
    whole = torch.arange(32.0).view(8, 4)
    made = torch.full_like(whole, torch.nan)
    for index in range(1 if shard is None else shard.degree):
        local = whole if shard is None else take(whole, shard, index)
        for start, stop in ((0, 1), (1, 1), (1, 3), (3, local.shape[0])):
            part = row_shard_of(local[start:stop], RowShard(start, stop), local, shard, index)
            assert part.size == (8, 4)
            for offsets, piece in part.boxes:
                places = tuple(slice(o, o + n) for o, n in zip(offsets, piece.shape, strict=True))
                made[places] = piece
    assert torch.equal(made, whole)


def test_a_scalar_is_its_own_part() -> None:
    part = row_shard_of(torch.ones(1), RowShard(0, 1), torch.ones(()), None, 0)
    assert part.size == ()
