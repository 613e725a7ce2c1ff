"""Layers dropped by chance on real ranks: parameters as in one process that drops the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from merak.core.random import set_random_state
from tests.multirank.compare import whole
from tests.multirank.ranks import RankError, RankPool
from tests.multirank.test_oom_replan import CALL, ENOUGH, PROPAGATE, SUM, Fault, injected
from tests.multirank.training import Layout, Outcome
from tests.tiers import slow
from tests.unit.graph.dropped_layers import Skipping, Stack, same_draws
from tests.unit.graph.masked import Masked, same_masks
from tests.unit.graph.tensor_parallel_cases import assert_gradients_equal

NUM_STEPS, NUM_MICROBATCHES, BATCH, SEED = 4, 2, 4, 3


def batch_of(step: int, microbatch: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + microbatch)
    return {"x": torch.randn(BATCH, 4, generator=generator)}


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Steps what has a gradient, be it zero."""
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.3)


def run_parallel(
    kind: type[Stack], layout: Layout, options: dict[str, Any], fault: Fault | None
) -> Outcome:
    import merak

    dp, tp, pp = layout
    mesh = merak.init(dp=dp, tp=tp, pp=pp, device="cpu")

    def share(step: int) -> dict[str, torch.Tensor]:
        places = [n * dp + mesh.dp_rank for n in range(NUM_MICROBATCHES // dp)]
        return {"x": torch.cat([batch_of(step, place)["x"] for place in places])}

    parallel = merak.parallelize(
        kind(),
        share(0),
        optimizer=adamw,
        num_microbatches=NUM_MICROBATCHES // dp,
        seed=SEED,
        **options,
    )
    outcome = Outcome(place=(mesh.dp_rank, mesh.tp_rank, mesh.pp_rank))
    with injected(fault or Fault(CALL, ()), mesh.rank, parallel.engine):
        for step in range(NUM_STEPS):
            outcome.losses.append(parallel.step(share(step)).item())
    outcome.final = {n: p.detach().clone() for n, p in parallel.engine.parameters.items()}
    outcome.shards = dict(parallel.engine.shards)
    return outcome


def run_alone(
    kind: Callable[[], Any], before: Callable[[Any, int], None] = lambda *_: None
) -> tuple[Outcome, int]:
    """What one process sees, and how often a parameter has no gradient in a step.

    `before` is called with the model and the number of each step.
    """
    model = kind()
    optimizer = adamw(model.parameters())
    outcome, num_without = Outcome(), 0
    for step in range(NUM_STEPS):
        before(model, step)
        optimizer.zero_grad()
        total = 0.0
        for place in range(NUM_MICROBATCHES):
            set_random_state(torch.device("cpu"), SEED, "microbatch", step, place, "choices")
            with same_draws(), same_masks():
                loss = model(**batch_of(step, place))["loss"] / NUM_MICROBATCHES
            loss.backward()
            total += loss.item()
        num_without += sum(p.grad is None for p in model.parameters())
        optimizer.step()
        outcome.losses.append(total)
    outcome.final = {n: p.detach().clone() for n, p in model.named_parameters()}
    return outcome, num_without


@pytest.mark.parametrize(
    "layout,options",
    [
        ((1, 1, 2), {"schedule": "1f1b", "recompute": True}),
        slow((1, 1, 2), {"schedule": "1f1b", "recompute": "off", "offload_activations": "full"}),
        slow((1, 2, 1), {"schedule": "1f1b"}),
        slow((2, 1, 1), {"zero": 2}),
        ((1, 2, 2), {"schedule": "1f1b", "sub_pipelining": "on", "recompute": True}),
        slow((1, 2, 2), {"schedule": "zero_bubble_h1"}),
    ],
    ids=[
        "pp-recompute",
        "pp-offload",
        "tp",
        "zero2",
        "halves-pp",
        "tp-pp-split-backward",
    ],
)
def test_as_one_process(pool: RankPool, layout: Layout, options: dict[str, Any]) -> None:
    compare(pool, Skipping, layout, options)


@pytest.mark.parametrize(
    "layout,fault",
    [
        pytest.param((1, 1, 2), Fault(PROPAGATE, (1,), 2), id="pp"),
        pytest.param(
            (1, 2, 1), Fault(SUM, (1,), 1), id="tp", marks=[pytest.mark.drains_tp, pytest.mark.slow]
        ),
    ],
)
def test_a_step_that_runs_again_draws_the_same(
    pool: RankPool, layout: Layout, fault: Fault
) -> None:
    options = {"schedule": "1f1b", "recompute": "auto", "memory_budget": ENOUGH}
    compare(pool, Skipping, layout, options, fault)


@pytest.mark.parametrize(
    "layout,options",
    [((2, 1, 1), {"zero": 2}), slow((1, 2, 2), {"schedule": "1f1b", "sub_pipelining": "on"})],
    ids=["dp", "tp-pp-halves"],
)
def test_masks_drawn_by_numpy(pool: RankPool, layout: Layout, options: dict[str, Any]) -> None:
    compare(pool, Masked, layout, options)


def compare(
    pool: RankPool,
    kind: type[Stack],
    layout: Layout,
    options: dict[str, Any],
    fault: Fault | None = None,
) -> None:
    expected, num_without = run_alone(kind)
    assert num_without or kind is Masked, "no layer was dropped for a whole step"
    dp, tp, pp = layout
    ranks = pool.run(run_parallel, dp * tp * pp, kind, layout, options, fault)
    for rank in ranks:
        assert rank.losses == pytest.approx(expected.losses, rel=1e-5)
    assert_gradients_equal(whole(ranks, "final"), expected.final)


class OneForAll(Stack):
    """The same block again and again, or not."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for _ in self.blocks:
            if torch.rand(()) < 0.5:
                x = self.blocks[0](x)
        return x


def build(kind: type[Stack], layout: Layout, options: dict[str, Any]) -> None:
    import merak

    dp, tp, pp = layout
    merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    merak.parallelize(kind(), batch_of(0, 0), optimizer=adamw, num_microbatches=2, **options)


@pytest.mark.parametrize(
    "kind,layout,options,words",
    [
        (Skipping, (2, 1, 1), {"zero": 3}, "the model drops layers at random"),
        (
            OneForAll,
            (1, 1, 2),
            {"partition": (3, 3)},
            r"shared by layers on pp ranks 0, 1, all of which a step may leave out",
        ),
    ],
    ids=["zero3", "shared"],
)
def test_refused(
    pool: RankPool, kind: type[Stack], layout: Layout, options: dict[str, Any], words: str
) -> None:
    dp, tp, pp = layout
    with pytest.raises(RankError, match=words):
        pool.run(build, dp * tp * pp, kind, layout, options)
