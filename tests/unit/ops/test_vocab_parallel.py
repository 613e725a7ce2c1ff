"""Look-ups in a table of which every rank has some rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from merak.core.mesh import Mesh, pretended
from merak.core.shards import ParameterShard, join, take
from merak.ops.vocab_parallel import vocab_parallel_embedding

ROWS, DEGREE = 10, 4


@pytest.mark.parametrize(
    "how",
    [{}, {"padding_idx": 9}, {"padding_idx": 2, "scale_grad_by_freq": True}, {"sparse": True}],
)
def test_the_ranks_sum_is_the_look_up(how: dict[str, Any]) -> None:
    torch.manual_seed(0)
    shard = ParameterShard(0, (ROWS,), DEGREE)
    table, indices = torch.rand(ROWS, 3, requires_grad=True), torch.randint(ROWS, (4, 6))
    expected = functional.embedding(indices, table, **how)
    upstream = torch.rand(expected.shape)
    expected.backward(upstream)
    shares = [take(table.detach(), shard, rank).requires_grad_() for rank in range(DEGREE)]
    found = []
    options = (how.get("padding_idx", -1), how.get("scale_grad_by_freq", False))
    for rank, share in enumerate(shares):
        with pretended(Mesh(1, DEGREE, 1, rank, torch.device("cpu"), None)):
            sparse = how.get("sparse", False)
            found.append(vocab_parallel_embedding(share, indices, *options, sparse, ROWS, "tp"))
    torch.stack(found).sum(0).backward(upstream)
    assert torch.equal(torch.stack(found).sum(0), expected)
    assert table.grad is not None
    gradients = [share.grad.to_dense() for share in shares if share.grad is not None]
    torch.testing.assert_close(join(gradients, shard), table.grad.to_dense())
    assert not gradients[-1].narrow(0, 1, 2).any()  # padding
