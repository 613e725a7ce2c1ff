"""Delayed updates of an optimizer in host memory: gradients at weights of one update earlier."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import merak
from merak.core import mesh
from merak.plan.optimizer import home
from tests.multirank.ranks import RankPool
from tests.multirank.test_offload_optimizer import (
    AWAY,
    EARLY,
    MASTERS,
    OPTIMIZERS,
    Setting,
    make,
    parameters,
)
from tests.multirank.training import Layout
from tests.tiers import slow

DELAYED = AWAY | {"delay_optimizer_update": True}

Job = tuple[Layout, list[Setting]]

NUM_STEPS = 4


class ByHand:
    """A job whose loop holds the gradients of every step back, until the next has run.

    Args:
        setting: of the job, whose optimizer steps on the device.
    """

    def __init__(self, setting: Setting) -> None:
        options, name, optimizer = setting
        self.parallel, self.batch = make((options, name, "none"), {})
        self.named = self.parallel.engine.optimizer_params.named
        self.optimizer = OPTIMIZERS[optimizer](self.named.values())
        self.held: dict[str, torch.Tensor] = {}
        self.learning_rate = 0.0

    def step(self) -> torch.Tensor:
        """A training step, and the update of the one before."""
        loss = self.parallel.step(self.batch)
        found = {n: t.grad.clone() for n, t in self.named.items() if t.grad is not None}
        if not found:  # it has overflowed, and is left out
            return loss
        self.update()
        self.held = found
        self.learning_rate = self.optimizer.param_groups[0]["lr"]
        return loss

    def update(self) -> None:
        """Step the gradients that are held, with the learning rate of their step."""
        (group,) = self.optimizer.param_groups
        now, group["lr"] = group["lr"], self.learning_rate
        for name, tensor in self.named.items():
            tensor.grad = self.held.pop(name, None)
        self.optimizer.step()
        group["lr"] = now

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of the steps from now on."""
        self.optimizer.param_groups[0]["lr"] = rate

    def evaluate(self) -> torch.Tensor:
        """The loss with all updates."""
        self.update()
        return self.parallel.evaluate(self.batch)

    def parameters(self) -> list[torch.Tensor]:
        """The parameters with all updates."""
        self.update()
        return parameters(self.parallel)


class Delayed:
    """The same job with Merak's option.

    Args:
        setting: of the job.
        extra: further options.
    """

    def __init__(self, setting: Setting, extra: dict[str, Any]) -> None:
        self.parallel, self.batch = make(setting, extra)

    def step(self) -> torch.Tensor:
        """A training step."""
        return self.parallel.step(self.batch)

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of the steps from now on."""
        for group in self.parallel.optimizer.param_groups:
            group["lr"] = rate

    def evaluate(self) -> torch.Tensor:
        """The loss with all updates."""
        return self.parallel.evaluate(self.batch)

    def parameters(self) -> list[torch.Tensor]:
        """The parameters with all updates."""
        return parameters(self.parallel)


def trained(job: Any) -> list[torch.Tensor]:
    """Losses of some steps with a schedule, of evaluations, and the parameters behind them."""
    found = []
    for number in range(NUM_STEPS):
        found.append(job.step())
        job.set_rate(1e-2 / (number + 2))
        if number == 1:
            found += [job.evaluate(), *job.parameters()]
    return [*found, *job.parameters(), job.evaluate()]


def same(jobs: list[Job], folder: Path) -> list[list[bool]]:
    """Per setting, whether delayed jobs in host memory and files train as the loop by hand."""
    home.PART_BYTES = 2**12  # so that there are several
    found = []
    for layout, settings in jobs:
        mesh.reset()
        found += same_in(layout, settings, folder)
    return found


def same_in(layout: Layout, settings: list[Setting], folder: Path) -> list[list[bool]]:
    """The same in one layout."""
    dp, tp, pp = layout
    merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    found = []
    for setting in settings:
        expected = trained(ByHand(setting))
        seen = [list(map(torch.equal, expected, trained(Delayed(setting, DELAYED))))]
        files = DELAYED | {"offload_optimizer": str(folder)}
        seen.append(list(map(torch.equal, expected, trained(Delayed(setting, files)))))
        assert len(expected) > NUM_STEPS + 2
        found.append([all(own) for own in seen])
    return found


@pytest.mark.nccl_rules
@pytest.mark.parametrize(
    "jobs",
    [
        [
            (
                (2, 1, 1),
                [
                    ({}, "float32", "fused"),
                    ({"zero": 1} | MASTERS, "bfloat16", "fused"),
                    ({"zero": 3} | MASTERS | EARLY, "bfloat16", "fused"),
                    ({"zero": 2} | EARLY, "float32", "foreach"),
                ],
            ),
            ((1, 2, 1), [(MASTERS, "bfloat16", "fused"), (EARLY, "float32", "fused")]),
            ((1, 1, 2), [(EARLY, "float32", "fused"), (MASTERS, "bfloat16", "foreach")]),
        ],
        slow([((1, 1, 1), [({"autocast": torch.float16}, "float32", "fused")])]),
        slow([((1, 1, 2), [({"schedule": "chimera"} | EARLY, "float32", "fused")])]),
        slow([((2, 1, 1), [({"zero": 3}, "float32", "fused"), (EARLY, "bfloat16", "fused")])]),
    ],
    ids=["layouts", "fp16", "chimera", "replicas"],
)
def test_delayed_updates_are_those_of_a_loop_that_holds_gradients_back(
    pool: RankPool, jobs: list[Job], tmp_path: Path
) -> None:
    for rank in pool.run(same, math.prod(jobs[0][0]), jobs, tmp_path / "states"):
        assert rank == [[True, True]] * sum(len(settings) for _, settings in jobs)
