"""Which schedules the ways to reduce gradients over replicas work with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from merak.core.errors import ScheduleError
from merak.core.mesh import Mesh
from merak.plan.constraints import refuse_reductions
from merak.plan.options import ParallelOptions
from merak.plan.step_plans import StepPlans
from merak.schedule.catalog import FORMULAS

WAYS: list[dict[str, Any]] = [
    {"gradient_compression": "bf16"},
    {"gradient_compression": "powersgd"},
    {"local_steps": 20, "outer_optimizer": "nesterov"},
    {"hierarchical_reductions": "on"},
]


@pytest.mark.parametrize("options", WAYS, ids=lambda own: next(iter(own)))
@pytest.mark.parametrize("name", FORMULAS)
def test_every_synchronous_schedule_is_allowed(name: str, options: dict[str, Any]) -> None:
    schedule = StepPlans(name, 2, 4).base.schedule
    mesh = Mesh(4, 1, 2, 0, torch.device("cpu"), None, hosts=tuple("aabbccdd"))
    if schedule.is_synchronous or "hierarchical_reductions" in options:
        refuse_reductions(schedule, ParallelOptions(**options), mesh)
        return
    with pytest.raises(ScheduleError, match="synchronous schedule such as '1f1b'"):
        refuse_reductions(schedule, ParallelOptions(**options), mesh)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gradient_compression": "bf16", "local_steps": 2}, "use one of the two"),
        ({"hierarchical_reductions": "on", "local_steps": 2}, "use one of the two"),
        (
            {"hierarchical_reductions": "on", "gradient_compression": "1bit"},
            "use one of the two",
        ),
        ({"gradient_compression": "bf16", "zero": 3}, "use zero=0, or gradient_compression='off'"),
        ({"ema_decay": 0.9, "local_steps": 2}, "each has its own between rounds; use one"),
        ({"zero": 3, "zero_group_size": 3}, r"no groups of dp × cp = 4 replicas; use a number"),
        ({"zero": 3, "zero_group_size": 1}, r"no groups of dp × cp = 4 replicas; use a number"),
        ({"zero_group_size": 2}, "zero=0; give zero=3, 2 or 1, or leave it out"),
        (
            {"zero": 2, "zero_group_size": 2, "hierarchical_reductions": "on"},
            "then between them; use one of the two",
        ),
        ({"outer_optimizer": "nesterov"}, "give local_steps, such as 100"),
        ({"local_steps": 2, "zero": 3}, "use zero=0 with a larger tp or pp, or local_steps=0"),
    ],
)
def test_what_excludes_each_other_is_refused(options: dict[str, Any], words: str) -> None:
    mesh = Mesh(4, 1, 1, 0, torch.device("cpu"), None, hosts=tuple("aabb"))
    with pytest.raises(ScheduleError, match=words):
        refuse_reductions(StepPlans("1f1b", 1, 4).base.schedule, ParallelOptions(**options), mesh)


def test_groups_of_replicas_with_experts_over_replicas_are_refused() -> None:
    mesh = Mesh(4, 1, 1, 0, torch.device("cpu"), None, ep=2)
    options = ParallelOptions(zero=1, zero_group_size=2)
    with pytest.raises(ScheduleError, match="have different experts; use experts over tp"):
        refuse_reductions(StepPlans("1f1b", 1, 4).base.schedule, options, mesh)
    refuse_reductions(
        StepPlans("1f1b", 1, 4).base.schedule,
        ParallelOptions(zero=1, zero_group_size=4),  # of all replicas, as without
        mesh,
    )
