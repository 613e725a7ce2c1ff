"""Tables whose look-ups ask for sparse gradients train in every layout as in one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.multirank.ranks import RankError, RankPool
from tests.tiers import slow

Layout = tuple[int, int, int]
ROWS, WIDTH, SAMPLES, MICROBATCHES, STEPS = 20, 8, 16, 2, 3
MAX_NORM = 0.5


class Tables(nn.Module):
    """Two tables with sparse gradients, one of them read again at the end, and a bag of one."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, sparse=sparse, padding_idx=0)
        self.bag = nn.EmbeddingBag(ROWS, WIDTH, sparse=sparse, mode="sum")
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, ROWS)

    def forward(self, ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.table(ids).mean(1) + self.bag(ids)
        for block in self.blocks:
            x = torch.tanh(block(x))
        x = x + self.table(ids.flip(1)).mean(1)
        return nn.functional.cross_entropy(self.head(x), y)


def model_of(sparse: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return Tables(sparse)


def batch_of(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, ROWS, (SAMPLES, 5), generator=generator)
    return {"ids": ids, "y": torch.randint(0, ROWS, (SAMPLES,), generator=generator)}


def train(layout: Layout, options: dict[str, Any], optimizer: str) -> dict[str, torch.Tensor]:
    """The whole tables after some steps, on each rank that holds them."""
    import merak

    dp, tp, pp = layout
    mesh = merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    own = SAMPLES // dp
    parallel = merak.parallelize(
        model_of(),
        {name: column[:own] for name, column in batch_of(0).items()},
        optimizer=partial(getattr(torch.optim, optimizer), lr=0.3),
        num_microbatches=MICROBATCHES,
        max_grad_norm=MAX_NORM,
        **options,
    )
    for step in range(STEPS):
        batch = {n: c[mesh.dp_rank * own :][:own] for n, c in batch_of(step).items()}
        parallel.step(batch)
    split = parallel.engine.shards
    with parallel.engine.whole_model():
        named = dict(parallel.model.named_parameters())
        return {n: p.detach().clone() for n, p in named.items() if n not in split and not p.is_meta}


def expected(optimizer: str) -> dict[str, torch.Tensor]:
    """One process, whose tables have the dense gradients of the same numbers."""
    model = model_of(sparse=False)
    stepping = getattr(torch.optim, optimizer)(model.parameters(), lr=0.3)
    for step in range(STEPS):
        stepping.zero_grad()
        model(**batch_of(step)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        stepping.step()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("layout", "options", "optimizer"),
    [
        ((2, 1, 1), {"zero": 2}, "Adagrad"),
        slow((2, 1, 1), {"zero": 3}, "SGD"),
        slow((1, 2, 1), {}, "SGD"),
        slow((1, 1, 2), {}, "SGD"),
    ],
    ids=str,
)
def test_as_in_one_process(
    pool: RankPool, layout: Layout, options: dict[str, Any], optimizer: str
) -> None:
    found = pool.run(train, 2, layout, options, optimizer)
    wanted = expected(optimizer)
    assert all(found)
    for rank in found:
        for name, value in rank.items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6)


def test_an_optimizer_of_sparse_gradients_alone_is_refused_on_all_ranks(pool: RankPool) -> None:
    with pytest.raises(RankError, match="SparseAdam takes sparse gradients alone") as caught:
        pool.run(train, 2, (2, 1, 1), {}, "SparseAdam")
    assert "still waiting" not in str(caught.value)
