"""Progressive layer dropping on real ranks: as one process that drops the same blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from merak.plan.layer_dropping import kept, kept_at
from tests.multirank.compare import whole
from tests.multirank.ranks import RankError, RankPool
from tests.multirank.test_dropped_layers import (
    SEED,
    build,
    run_alone,
    run_parallel,
)
from tests.multirank.test_expert_dispatch import trained
from tests.multirank.training import Layout
from tests.tiers import slow
from tests.unit.graph.dropped_layers import DEPTH, WIDTH, Block, Stack
from tests.unit.graph.tensor_parallel_cases import assert_gradients_equal

KEEP, DECAY = 0.1, 3.0
OPTIONS = {"layer_keep": KEEP, "layer_keep_decay": DECAY}


class Blocks(Stack):
    """A model that drops nothing itself."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Sublayers(Block):
    """A block of two sublayers, which normalises its second sum, as BERT's."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)
        self.last_norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.branch(x)
        y: torch.Tensor = self.last_norm(x + self.out(torch.tanh(x)))
        return y


class TwoSums(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Sublayers() for _ in range(DEPTH))


class TwoSumsAlone(TwoSums):
    """The same as `TwoSums` with `layer_keep`, written out: each sublayer draws for itself."""

    last = 1.0

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for depth, block in enumerate(self.blocks, 1):
            keep = torch.tensor(kept_at(depth, DEPTH, self.last))
            if torch.rand(()) < keep:
                x = x + block.branch(x) / keep
            own = x
            if torch.rand(()) < keep:
                own = x + block.out(torch.tanh(x)) / keep
            x = block.last_norm(own)
        return x


class Dropping(Stack):
    """A model that drops layers itself, all with one probability."""

    def __init__(self) -> None:
        super().__init__()
        self.layerdrop = 0.2

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.training and torch.rand(()) < self.layerdrop:
                continue
            x = block(x)
        return x


class BlocksAlone(Stack):
    """The same as `Blocks` with `layer_keep`, written out."""

    last = 1.0

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for depth, block in enumerate(self.blocks, 1):
            keep = torch.tensor(kept_at(depth, DEPTH, self.last))
            if torch.rand(()) < keep:
                x = x + block.branch(x) / keep
        return x


class DroppingAlone(Dropping):
    """The same as `Dropping` with `layer_keep`."""

    last = 1.0

    def run(self, x: torch.Tensor) -> torch.Tensor:
        self.layerdrop = torch.tensor(1 - self.last)  # type: ignore[assignment]
        return super().run(x)


def set_last(model: BlocksAlone | TwoSumsAlone | DroppingAlone, step: int) -> None:
    model.last = kept(step, KEEP, DECAY)


@pytest.mark.parametrize(
    ("kind", "alone", "layout", "options"),
    [
        (TwoSums, TwoSumsAlone, (1, 1, 2), {"recompute": True}),
        slow(Blocks, BlocksAlone, (2, 1, 1), {"zero": 2}),
        slow(TwoSums, TwoSumsAlone, (1, 2, 2), {"schedule": "zero_bubble_h1"}),
        slow(Blocks, BlocksAlone, (1, 1, 2), {"schedule": "chimera"}),
        slow(Dropping, DroppingAlone, (1, 2, 1), {}),
        slow(Dropping, DroppingAlone, (2, 1, 2), {"schedule": "gpipe", "zero": 1}),
    ],
)
def test_as_one_process(
    pool: RankPool, kind: type[Stack], alone: Any, layout: Layout, options: dict[str, Any]
) -> None:
    expected, num_without = run_alone(alone, set_last)
    assert num_without, "no block was dropped for a whole step"
    ranks = pool.run(
        run_parallel, layout[0] * layout[1] * layout[2], kind, layout, options | OPTIONS, None
    )
    for rank in ranks:
        assert rank.losses == pytest.approx(expected.losses, rel=1e-5)
    assert_gradients_equal(whole(ranks, "final"), expected.final)


def experts(degrees: dict[str, int]) -> list[float]:
    return trained("mixtral", degrees, {**OPTIONS, "seed": SEED})[0]


def test_experts_of_replicas_that_draw_otherwise_are_refused(pool: RankPool) -> None:
    with pytest.raises(RankError, match="ep=2, but each drops layers by draws of its own; use"):
        pool.run(experts, 2, {"dp": 2, "ep": 2})


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [{"cp": 2, "ep": 2}, {"tp": 2, "ep": 2}])
def test_ranks_of_one_replica_drop_the_same(pool: RankPool, degrees: dict[str, int]) -> None:
    alone = pool.run(experts, 1, {})[0]
    for losses in pool.run(experts, 2, degrees):
        assert losses == pytest.approx(alone, rel=1e-5)


def test_sharded_parameters_are_refused(pool: RankPool) -> None:
    with pytest.raises(RankError, match="the model drops layers at random"):
        pool.run(build, 2, Blocks, (2, 1, 1), {"zero": 3, **OPTIONS})
