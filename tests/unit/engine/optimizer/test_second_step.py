"""A loop of one device around `step`: what it has done already is refused, or has its sentence."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import merak
from merak.core.errors import ArgumentsError, TrainingError
from merak.parallel import ParallelModel

BATCH = {"x": torch.linspace(-1, 1, 32).reshape(4, 8)}
SCALER = torch.amp.GradScaler("cpu")

pytestmark = pytest.mark.usefixtures("one_rank")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(x).square().mean()}


def laid_out(autocast: torch.dtype | None = None) -> ParallelModel:
    return merak.parallelize(
        Model(), BATCH, optimizer=lambda own: torch.optim.SGD(own, lr=0.1), autocast=autocast
    )


def optimizer_of(parallel: ParallelModel) -> torch.optim.Optimizer:
    assert parallel.optimizer is not None
    return parallel.optimizer


@pytest.mark.parametrize(
    "again",
    [
        lambda _, loss: loss.backward(),
        lambda _, loss: (loss / 4).backward(),
        lambda _, loss: SCALER.scale(loss).backward(),
        lambda parallel, _: SCALER.unscale_(optimizer_of(parallel)),
        lambda parallel, _: SCALER.step(optimizer_of(parallel)),
    ],
    ids=["backward", "part", "scaled", "unscale", "scaler step"],
)
def test_a_second_backward_names_what_step_has_done(
    again: Callable[[ParallelModel, torch.Tensor], object],
) -> None:
    parallel = laid_out()
    loss = parallel.step(BATCH)
    with pytest.raises(TrainingError, match=r"has run the backward of its batch.*remove backward"):
        again(parallel, loss)


def test_a_second_step_of_the_optimizer_is_refused_and_changes_nothing() -> None:
    parallel = laid_out()
    parallel.step(BATCH)
    before = {name: value.clone() for name, value in parallel.engine.parameters.items()}
    with pytest.raises(TrainingError, match=r"has stepped the optimizer .* remove this second"):
        optimizer_of(parallel).step()
    for name, value in parallel.engine.parameters.items():
        assert torch.equal(value, before[name])
    parallel.step(BATCH)  # goes on


def test_scalers_and_backwards_of_other_models_are_left_alone() -> None:
    parallel = laid_out()
    parallel.step(BATCH)
    other, scaler = nn.Linear(2, 1), torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(other.parameters(), lr=1.0)
    before = other.bias.detach().clone()
    scaler.scale(other(torch.zeros(1, 2)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(other.bias, before - 1)
    with pytest.raises(RuntimeError, match="a second time"):
        (loss := other(torch.zeros(1, 2)).square().sum()).backward()
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["step", "evaluate"])
def test_an_autocast_around_a_step_is_refused_with_the_argument(
    dtype: torch.dtype, name: str
) -> None:
    parallel = laid_out()
    with (
        torch.autocast("cpu", dtype),
        pytest.raises(ArgumentsError, match=f"give merak.parallelize autocast={dtype}"),
    ):
        getattr(parallel, name)(BATCH)
    with torch.autocast("cpu", dtype), pytest.raises(ArgumentsError, match="around this call"):
        laid_out()
    with torch.autocast("cpu", dtype, enabled=False):
        getattr(parallel, name)(BATCH)


def test_the_jobs_own_autocast_may_be_around_a_step() -> None:
    losses = []
    for around in (nullcontext(), torch.autocast("cpu", torch.bfloat16)):
        parallel = laid_out(torch.bfloat16)
        with around:
            losses.append([float(parallel.step(BATCH)) for _ in range(3)])
    assert losses[0] == losses[1]
