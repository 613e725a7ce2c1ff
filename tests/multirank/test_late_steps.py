"""Steps that are not finite on a device that runs behind the host: found one step late."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

import merak
from merak.core.errors import TrainingError
from merak.engine.step.optimizer_step import StepEnd
from tests.multirank.ranks import RankPool
from tests.multirank.training import Setup, Texts, make_merak
from tests.tiers import slow

WIDTH, SAMPLES, BAD_STEP = 8, 8, 2


@contextmanager
def behind_the_host(is_behind: bool) -> Iterator[list[int]]:
    """The CPU as if it ran behind the host; gives how many step ends were known at each read."""
    reads: list[int] = []
    ends: list[StepEnd] = []
    make, read = StepEnd.__init__, StepEnd.read

    def noted(end: StepEnd, *args: Any) -> None:
        make(end, *args)
        ends.append(end)

    def noted_read(end: StepEnd) -> Any:
        reads.append(len(ends) - ends.index(end))
        return read(end)

    places = ("merak.engine.engine", "merak.engine.optimizer.connection")
    first, second = (patch(f"{place}.runs_behind", lambda device: is_behind) for place in places)
    with first, second, patch.multiple(StepEnd, __init__=noted, read=noted_read):
        yield reads


class Blocks(nn.Module):
    """Layers with running means, which a forward writes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for block, norm in zip(self.blocks, self.norms):
            x = torch.tanh(norm(block(x))) + torch.log(x + 100)
        return {"loss": x.square().mean()}


def batch(step: int, is_bad: bool) -> dict[str, torch.Tensor]:
    x = torch.linspace(0.5, 1, SAMPLES * WIDTH).reshape(SAMPLES, WIDTH) * (step + 1)
    if is_bad:
        x[-1] = -1000.0
    return {"x": x}


def make(degrees: dict[str, int], options: dict[str, Any]) -> Any:
    mesh = merak.init(**degrees, device="cpu")  # type: ignore[arg-type]

    def fused(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5, fused=True)

    options = {"num_microbatches": 2, "optimizer": fused, "max_grad_norm": 1.0, **options}
    return mesh, merak.parallelize(Blocks(), batch(0, False), **options)


def steps(degrees: dict[str, int], options: dict[str, Any], is_behind: bool) -> list[Any]:
    """Losses, parameters, buffers and reads of a loop of which one step is not finite."""
    with behind_the_host(is_behind) as reads:
        mesh, parallel = make(degrees, {"nan_policy": "skip", "locate_nan": True, **options})
        is_hit = mesh.dp_rank == mesh.dp - 1
        losses = [parallel.step(batch(n, is_hit and n == BAD_STEP)) for n in range(5)]
        parallel.check_replicas()
        seen = [*losses, *parallel.engine.optimizer_params.named.values()]
        seen += [buffer for _, buffer in sorted(parallel.engine._state.buffers.items())]
        return [[one.detach().clone() for one in seen], reads]


LAYOUTS = [
    ({}, {}),
    slow({"dp": 2}, {"zero": 1}),
    slow({"dp": 2}, {"zero": 3}),
    slow({"pp": 2}, {}),
    slow({"pp": 2}, {"autocast": torch.float16}),
]


@pytest.mark.parametrize("degrees,options", LAYOUTS)
def test_what_the_device_leaves_out_is_as_if_the_host_had(
    pool: RankPool, degrees: dict[str, int], options: dict[str, Any]
) -> None:
    ranks = max(degrees.values(), default=1)
    at_once = pool.run(steps, ranks, degrees, options, False)
    late = pool.run(steps, ranks, degrees, options, True)
    for (expected, reads), (found, late_reads) in zip(at_once, late, strict=True):
        assert any(math.isnan(float(one)) for one in found[:5])
        assert all(torch.isfinite(one).all() for one in found[5:])
        for one, other in zip(expected, found, strict=True):
            assert torch.equal(one, other) or bool(torch.isnan(one).all())
        assert reads == [1] * 5
        assert late_reads == [2] * 4 + [1]  # while the next step runs, and at the look at replicas


def stops(degrees: dict[str, int]) -> list[Any]:
    """What a job says that stops at a step that is not finite, and whether weights have moved."""
    with behind_the_host(True):
        mesh, parallel = make(degrees, {"nan_policy": "stop", "locate_nan": True})
        for step in range(BAD_STEP):
            parallel.step(batch(step, False))
        before = [p.detach().clone() for p in parallel.engine.optimizer_params.named.values()]
        parallel.step(batch(BAD_STEP, mesh.dp_rank == mesh.dp - 1))
        with pytest.raises(TrainingError) as caught:
            parallel.step(batch(BAD_STEP + 1, False))
        now = parallel.engine.optimizer_params.named.values()
        return [str(caught.value), all(map(torch.equal, before, now))]


@pytest.mark.parametrize("degrees", [{}, slow({"pp": 2})])
def test_a_job_stops_one_step_late_and_names_the_step_before(
    pool: RankPool, degrees: dict[str, int]
) -> None:
    for sentence, is_as_before in pool.run(stops, max(degrees.values(), default=1), degrees):
        assert re.match(rf"step {BAD_STEP} has loss nan and gradient norm nan \(NaN ", sentence)
        assert "torch.log(x + 100)" in sentence
        assert is_as_before


class Rates(TrainerCallback):
    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.rates.append(kwargs["optimizer"].param_groups[0]["lr"])


def trained(degrees: dict[str, int], arguments: dict[str, Any], is_behind: bool) -> list[Any]:
    """Rates, parameters, the run's loss and reads of a trainer whose first steps overflow."""
    with behind_the_host(is_behind) as reads:
        mesh = merak.init(**degrees, device="cpu")  # type: ignore[arg-type]
        seen = Rates()
        own = {"max_steps": 6, "optim": "adamw_torch_fused", "logging_steps": 5, **arguments}
        setup = Setup("plain", arguments=own)
        trainer = make_merak(
            setup, mesh.dp, "", train_dataset=Texts(96, padded=False), callbacks=[seen]
        )
        if trainer.scaler is not None:
            trainer.scaler.update(2.0**24)
        result = trainer.train()
        parameters = [p.detach().clone() for p in trainer.engine.parameters.values()]
        return [seen.rates, parameters, result.training_loss, reads]


@pytest.mark.parametrize("degrees", [{"pp": 2}])
def test_the_learning_rate_of_a_step_that_is_left_out_is_used_again(
    pool: RankPool, degrees: dict[str, int]
) -> None:
    arguments = {"fp16": True}
    at_once = pool.run(trained, 2, degrees, arguments, False)
    late = pool.run(trained, 2, degrees, arguments, True)
    for (rates, expected, loss, _), (late_rates, found, late_loss, reads) in zip(at_once, late):
        assert rates == late_rates and len({*rates}) < len(rates)
        assert all(map(torch.equal, expected, found))
        assert loss == late_loss
        assert reads == [2] * 4 + [1] * 2  # at once where the step is logged
