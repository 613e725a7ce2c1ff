"""Options for slow links, and dropped layers, with every schedule that they allow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

import merak
from merak.core import mesh as meshes
from merak.engine.comm.replica_levels import Levels
from merak.plan.step_plans import StepPlans
from merak.schedule.catalog import FORMULAS
from tests.multirank.ranks import RankPool
from tests.multirank.test_layer_keep import Blocks
from tests.unit.graph.tensor_parallel_cases import assert_gradients_equal

SCHEDULES = [name for name in FORMULAS if StepPlans(name, 2, 4).base.schedule.is_synchronous]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "levels": {"hierarchical_reductions": "on"},
    "local": {"local_steps": 1},
    "bf16": {"gradient_compression": "bf16"},
    "1bit": {"gradient_compression": "1bit"},
    "dropped": {"layer_keep": 0.1, "layer_keep_decay": 3.0},
}
STEPS, SAMPLES = 3, 16


def sgd(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


Found = dict[str, tuple[list[float], dict[str, torch.Tensor]]]


def train(schedule: str, names: Sequence[str] = tuple(OPTIONS)) -> Found:
    """Losses and parameters with every option: four replicas of two stages, on four hosts."""
    mesh = merak.init(dp=4, pp=2, device="cpu")
    mesh = replace(mesh, hosts=tuple("aabbccdd"))
    meshes.set_mesh(mesh)

    def share(step: int) -> dict[str, torch.Tensor]:
        x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(step))
        return {"x": x.chunk(4)[mesh.dp_rank]}

    found: Found = {}
    for name in names:
        parallel = merak.parallelize(
            Blocks(), share(0), optimizer=sgd, num_microbatches=4, schedule=schedule, seed=3,
            **OPTIONS[name],
        )  # fmt: skip
        with mock.patch.object(Levels, "start", autospec=True, side_effect=Levels.start) as started:
            losses = [float(parallel.step(share(step))) for step in range(STEPS)]
        assert started.called is (name == "levels")
        parallel.check_replicas()  # all ranks have stepped the same, bit by bit
        found[name] = losses, parallel.gather_state_dict()
    return found


@pytest.fixture(scope="module")
def usual(pool: RankPool) -> Found:
    return pool.run(train, 8, "1f1b")[0]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES[::2])
def test_each_option_trains_as_without_or_as_with_1f1b(
    pool: RankPool, usual: Found, schedule: str
) -> None:
    found = pool.run(train, 8, schedule)[0]
    for name, (losses, parameters) in (
        ("plain", usual["plain"]),
        ("dropped", usual["dropped"]),
        ("levels", found["plain"]),
        ("local", found["plain"]),  # of averages after every step of plain SGD
    ):
        assert found[name][0] == pytest.approx(losses, rel=1e-5)
        assert_gradients_equal(found[name][1], parameters)
    plain = found["plain"][0]
    for name, most in (("bf16", 1e-2), ("1bit", 0.3)):
        assert found[name][0] == pytest.approx(plain, rel=most) and found[name][0] != plain
    assert found["dropped"][0][1:] != pytest.approx(plain[1:], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["pipedream", "pipedream_2bw"])
def test_updates_inside_a_step_reduce_by_hierarchy_too(pool: RankPool, schedule: str) -> None:
    found = pool.run(train, 8, schedule, ("plain", "levels"))[0]
    assert found["levels"][0] == pytest.approx(found["plain"][0], rel=1e-5)
    assert_gradients_equal(found["levels"][1], found["plain"][1])
