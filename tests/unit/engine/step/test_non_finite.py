"""Where a step is first not finite: the operator, the column, the parameter; or none of them."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import merak
from merak.core.errors import ArgumentsError, TrainingError
from merak.parallel import ParallelModel

WIDTH, SAMPLES = 8, 4
BATCH = {"x": torch.linspace(-1, 1, SAMPLES * WIDTH).reshape(SAMPLES, WIDTH)}


pytestmark = pytest.mark.usefixtures("one_rank")


class Layered(nn.Module):
    """Blocks of a linear layer, of which one has a function of the test's own behind it."""

    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.function = function

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for number, block in enumerate(self.blocks):
            x = x + torch.tanh(block(x))
            if number == 1:
                x = self.function(x)
        return {"loss": x.square().mean()}


class LogOfNegative(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(x - 10)


class RootOfZero(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sqrt((x - x.detach()).abs())  # whose slope at 0 is infinite


class Masked(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.arange(WIDTH) > 3
        scores = torch.softmax(x.masked_fill(hidden, -math.inf), -1)  # intended
        return torch.log(x * scores - 10)


class Large(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1e38


def parallel(function: nn.Module, count: int = 2, **options: object) -> ParallelModel:
    options = {"nan_policy": "stop", "locate_nan": True, **options}
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
    return merak.parallelize(
        Layered(function), BATCH, optimizer=sgd, num_microbatches=count, **options  # type: ignore[arg-type]
    )  # fmt: skip


def line_of(text: str) -> str:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    number = next(n for n, line in enumerate(lines, 1) if text in line and "line_of" not in line)
    return f"{__file__}:{number}: `{lines[number - 1].strip()}`"


def said(model: ParallelModel, batch: dict[str, torch.Tensor] = BATCH) -> str:
    with pytest.raises(TrainingError) as caught:
        model.step(batch)
    return str(caught.value)


@pytest.mark.parametrize("recompute", ["off", "full", "selective"])
def test_the_operator_of_a_forward_is_named_with_its_line(recompute: str) -> None:
    message = said(parallel(LogOfNegative(), recompute=recompute))
    assert message.startswith("step 0 has loss nan and gradient norm nan (NaN first appeared in ")
    assert "the forward of microbatch 0, in segment 1 (blocks.1): operator aten.log of" in message
    assert "module function at " + line_of("return torch.log(x - 10)") in message


@pytest.mark.parametrize("recompute", ["off", "full"])
def test_the_operator_of_a_backward_is_named_with_its_line(recompute: str) -> None:
    message = said(parallel(RootOfZero(), recompute=recompute))
    assert re.match(r"step 0 has loss \d[.\d]* and gradient norm nan \(", message)
    assert "first appeared in the backward of microbatch 0, in segment 1 (blocks.1)" in message
    assert (
        "the gradient of operator aten.sqrt of module function at " + line_of("return torch.sqrt(")
        in message
    )


def test_infinite_numbers_of_masks_are_not_named() -> None:
    message = said(parallel(Masked()))
    assert (
        "operator aten.log of module function at " + line_of("return torch.log(x * scores")
        in message
    )


def test_a_column_is_named_with_its_microbatch() -> None:
    bad = BATCH["x"].clone()
    bad[3, 1] = math.inf
    message = said(parallel(nn.Identity()), {"x": bad})
    assert "(an infinite value is in column 'x' of the batch, in microbatch 1)" in message


def test_a_parameter_is_named() -> None:
    model = parallel(nn.Identity())
    with torch.no_grad():
        model.engine.parameters["blocks.2.weight"][0, 0] = math.nan
    assert "(NaN is in parameter blocks.2.weight before the step, in microbatch 0)" in said(model)


def test_a_step_that_is_finite_when_it_runs_again_is_said_to_be() -> None:
    model = parallel(nn.Identity())
    model.engine.gradient_norm = lambda: torch.tensor(math.nan)  # type: ignore[method-assign]
    assert "was finite when it ran once more on the same weights" in said(model)


def test_an_overflow_is_named() -> None:
    assert "an infinite value first appeared in the forward of microbatch 0" in said(
        parallel(Large())
    )


def test_a_skipped_step_leaves_parameters_and_goes_on() -> None:
    model = parallel(nn.Identity(), nan_policy="skip", locate_nan=False)
    before = {n: p.clone() for n, p in model.engine.parameters.items()}
    bad = BATCH["x"] * math.nan
    assert math.isnan(float(model.step({"x": bad})))
    assert all(torch.equal(before[n], p) for n, p in model.engine.parameters.items())
    assert math.isfinite(float(model.step(BATCH)))
    assert any(not torch.equal(before[n], p) for n, p in model.engine.parameters.items())
    for _ in range(10):
        model.step({"x": bad})
    with pytest.raises(TrainingError, match="the 10 steps before it were skipped too"):
        model.step({"x": bad})


class Normed(nn.Module):
    """A layer with running means."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.norm(self.linear(x)).square().mean()}


@pytest.mark.parametrize("locates", [False, True])
def test_running_means_are_those_before_a_skipped_step(locates: bool) -> None:
    model = merak.parallelize(Normed(), BATCH, nan_policy="skip", locate_nan=locates)
    model.step(BATCH)
    before = model.model.norm.running_mean.clone()  # type: ignore[union-attr, operator]
    model.step({"x": BATCH["x"] * math.nan})
    assert torch.equal(model.model.norm.running_mean, before)  # type: ignore[arg-type, union-attr]


def test_an_asynchronous_update_that_is_not_finite_is_found_in_its_step() -> None:
    """The loss is finite, and gradients are gone after the updates inside."""
    model = parallel(RootOfZero(), 1, locate_nan=False, schedule="pipedream")
    assert re.match(r"step 0 has loss \d[.\d]* and gradient norm nan;", said(model))


@pytest.mark.parametrize(
    "options,message",
    [
        ({"nan_policy": "roll"}, "nan_policy='roll' is not a choice; use 'stop', 'skip' or"),
        ({"nan_policy": "ignore"}, "locate_nan=True looks at steps that are not finite, but"),
    ],
)
def test_policies_that_make_no_sense_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(ArgumentsError, match=re.escape(message)):
        parallel(nn.Identity(), **options)
