"""What forward writes without gradients, and keeps in lists and dicts, is as in eager code."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from merak.core.errors import TraceError
from tests.unit.engine.test_python_state import batch, engine_of, step

pytestmark = pytest.mark.usefixtures("one_rank")


class Writes(nn.Module):
    """A forward that uses one of several ways to keep what it has computed."""

    def __init__(self, use: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.use = use
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scratch", torch.zeros(2, 4))
        self.mean = torch.zeros(4)
        self.means = [torch.zeros(4)]
        self.table = {"mean": torch.zeros(4)}
        self.parts: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.use(self, torch.tanh(self.linear(x))).square().mean()}


def average(mean: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        mean.mul_(0.5).add_(x.mean(0), alpha=0.5)
    return x - mean


@torch.no_grad()
def filled(scratch: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return scratch.copy_(x * 2)


def summed(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.parts.append(x.mean())
    total = sum(model.parts, x)
    model.parts.clear()
    return total


FOLLOWED: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "a scratch is subtracted": lambda m, x: x - 3 * filled(m.scratch, x),
    "a scratch is a factor": lambda m, x: x * filled(m.scratch, x),
    "a scratch is read before and behind": lambda m, x: x + m.scratch - 3 * filled(m.scratch, x),
    "a plain tensor": lambda m, x: average(m.mean, x),
    "a tensor in a list": lambda m, x: average(m.means[0], x),
    "a tensor in a dict": lambda m, x: average(m.table["mean"], x),
    "a list that is emptied": summed,
}


@pytest.mark.parametrize("use", FOLLOWED.values(), ids=FOLLOWED)
def test_what_is_written_is_read_behind_it(
    use: Callable[[Any, torch.Tensor], torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    model = Writes(use)
    expected = copy.deepcopy(model)
    with caplog.at_level(logging.WARNING):
        engine = engine_of(model)
    assert "forward keeps tensors" not in caplog.text
    for number in range(3):
        expected.zero_grad()
        loss = expected(**batch())["loss"]
        loss.backward()
        assert step(engine, number) == pytest.approx(loss.item(), rel=1e-6)
        for name, parameter in expected.named_parameters():
            torch.testing.assert_close(engine.parameters[name].grad, parameter.grad)
        for ours, theirs in [
            (model.mean, expected.mean),
            (model.means[0], expected.means[0]),
            (model.table["mean"], expected.table["mean"]),
        ]:
            torch.testing.assert_close(ours, theirs)


def replace_item(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.means[0] = (model.means[0] + x.detach().mean(0)) / 2
    return x - model.means[0]


def replace_value(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.table["mean"] = (model.table["mean"] + x.detach().mean(0)) / 2
    return x - model.table["mean"]


@pytest.mark.parametrize(
    ("use", "label"), [(replace_item, r"means\[0\]"), (replace_value, r"table\['mean'\]")]
)
def test_a_tensor_that_forward_replaces_there_is_refused(use: Any, label: str) -> None:
    model = Writes(use)
    own = [model.means[0], model.table["mean"]]
    with pytest.raises(TraceError, match=f"keeps the tensor {label} from one step to the next"):
        engine_of(model)
    assert model.means[0] is own[0]  # and no tensor without values stays in the model
    assert model.table["mean"] is own[1]


def grow(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.parts.append(x.detach().mean(0))
    return x - sum(model.parts)


def test_tensors_that_forward_keeps_there_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model = Writes(grow)
    with caplog.at_level(logging.WARNING):
        engine_of(model)
    assert "forward keeps tensors in parts, a list" in caplog.text
    assert model.parts == []
