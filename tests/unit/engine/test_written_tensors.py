"""What forward writes without gradients, and keeps in lists and dicts, is as in eager code."""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from merak.core.errors import TraceError
from tests.tiers import one_in
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
        self.means = [torch.zeros(4), torch.ones(4), 2 * torch.ones(4)]
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


def replace_item(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.means[0] = (model.means[0] + x.detach().mean(0)) / 2
    return x - model.means[0]


def replace_value(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.table["mean"] = (model.table["mean"] + x.detach().mean(0)) / 2
    return x - model.table["mean"]


def replace_behind(model: Any, x: torch.Tensor) -> torch.Tensor:
    out = x * model.mean.exp()
    model.mean = 0.9 * model.mean + 0.1 * x.detach().mean(0)
    return out


def replace_saved(model: Any, x: torch.Tensor) -> torch.Tensor:
    out = x * model.mean
    model.mean = 0.9 * model.mean + 0.1 * x.detach().mean(0) + 1
    return out


def shift(model: Any, x: torch.Tensor) -> torch.Tensor:
    out = x - model.means[-1]
    model.means.insert(0, x.detach().mean(0))
    model.means.pop()
    return out


FOLLOWED: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "a scratch is subtracted": lambda m, x: x - 3 * filled(m.scratch, x),
    "a scratch is a factor": lambda m, x: x * filled(m.scratch, x),
    "a scratch is read before and behind": lambda m, x: x + m.scratch - 3 * filled(m.scratch, x),
    "a plain tensor": lambda m, x: average(m.mean, x),
    "a tensor in a list": lambda m, x: average(m.means[0], x),
    "a tensor in a dict": lambda m, x: average(m.table["mean"], x),
    "a list that is emptied": summed,
    "a tensor in a list that is replaced": replace_item,
    "a tensor in a dict that is replaced": replace_value,
    "a tensor that is replaced": replace_behind,
    "a queue": shift,
    "a tensor that is replaced, and its old value saved": replace_saved,
}


@one_in(4)
@pytest.mark.parametrize("use", FOLLOWED.values(), ids=FOLLOWED)
def test_what_is_written_is_read_behind_it(
    use: Callable[[Any, torch.Tensor], torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    model = Writes(use)
    expected = copy.deepcopy(model)
    with caplog.at_level(logging.WARNING):
        engine = engine_of(model)
    assert "forward keeps values" not in caplog.text
    for number in range(3):
        expected.zero_grad()
        loss = expected(**batch())["loss"]
        loss.backward()
        assert step(engine, number) == pytest.approx(loss.item(), rel=1e-6)
        for name, parameter in expected.named_parameters():
            torch.testing.assert_close(engine.parameters[name].grad, parameter.grad)
        for ours, theirs in [
            (model.mean, expected.mean),
            *zip(model.means, expected.means, strict=True),
            (model.table["mean"], expected.table["mean"]),
        ]:
            torch.testing.assert_close(ours, theirs)


def grow(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.parts.append(x.detach().mean(0))
    return x - sum(model.parts)


def read_before(model: Any, x: torch.Tensor) -> torch.Tensor:
    found = x - sum(model.parts)
    model.parts.append(x.detach().mean(0))
    return found


def read_length(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.seen.append(x.shape[0])
    return x * len(model.seen)


def read_last(model: Any, x: torch.Tensor) -> torch.Tensor:
    found = x - model.queue[-1] if model.queue else x
    model.queue.append(x.detach().mean(0))
    return found


def read_table(model: Any, x: torch.Tensor) -> torch.Tensor:
    found = x - model.store["mean"] if "mean" in model.store else x
    model.store["mean"] = x.detach().mean(0)
    return found


def read_inner(model: Any, x: torch.Tensor) -> torch.Tensor:
    found = x * (1 + len(model.nested["all"]))
    model.nested["all"].append(x.detach().mean(0))
    return found


def read_other(model: Any, x: torch.Tensor) -> torch.Tensor:
    found = x * (1 + len(model.parts))
    model.parts = [*model.parts, x.detach().mean(0)]
    return found


HISTORIES = {
    "parts": (grow, read_before, read_other),
    "seen": (read_length,),
    "queue": (read_last,),
    "store": (read_table,),
    "nested": (read_inner,),
}


class Keeps(Writes):
    """Has lists, deques and dicts that are filled from step to step."""

    def __init__(self, use: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__(use)
        self.seen: list[int] = []
        self.queue: deque[torch.Tensor] = deque(maxlen=2)
        self.store: dict[str, torch.Tensor] = {}
        self.nested: dict[str, list[torch.Tensor]] = {"all": []}


@one_in(4)
@pytest.mark.parametrize(
    ("name", "use"), [(name, use) for name, uses in HISTORIES.items() for use in uses]
)
def test_what_forward_adds_and_reads_in_the_next_step_is_refused(name: str, use: Any) -> None:
    model = Keeps(use)
    with pytest.raises(TraceError) as caught:
        engine_of(model)
    assert f"forward leaves values in model.{name}" in str(caught.value)
    assert "and its next call computes with them" in str(caught.value)
    assert "test_written_tensors.py:" in str(caught.value)
    assert not (model.parts or model.seen or model.queue or model.store or model.nested["all"])


def add(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.parts.append(x.detach().mean(0))
    return x


def add_number(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.parts.append(x.shape[0])
    return x


@pytest.mark.parametrize("use", [add, add_number])
def test_what_forward_adds_for_others_is_warned_of(
    use: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = Keeps(use)
    with caplog.at_level(logging.WARNING):
        engine_of(model)
    assert caplog.text.count("forward keeps values in model.parts, a list") == 1
    assert model.parts == []


def from_cache(model: Any, x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] not in model.store:
        model.store[x.shape[0]] = torch.arange(x.shape[0]).float()[:, None]
    return x * model.store[x.shape[0]]


def losses_beside(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.parts = []
    model.parts.append(x.square().mean())
    return x + sum(model.parts)


@pytest.mark.parametrize("use", [from_cache, losses_beside])
def test_caches_and_what_begins_anew_are_traced(use: Any) -> None:
    model = Keeps(use)
    expected = copy.deepcopy(model)
    engine = engine_of(model)
    for number in range(2):
        assert step(engine, number) == pytest.approx(expected(**batch())["loss"].item(), rel=1e-6)


SHARED_LIST: list[Any] = []
SHARED_TABLE: dict[str, Any] = {"means": [torch.zeros(4)]}


def add_to_global(model: Any, x: torch.Tensor) -> torch.Tensor:
    SHARED_LIST.append(x.detach().mean(0))
    return x


def test_what_forward_adds_to_a_global_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        engine_of(Writes(add_to_global))
    assert caplog.text.count(f"forward keeps values in {__name__}.SHARED_LIST, a list") == 1
    assert SHARED_LIST == []


def grow_global(model: Any, x: torch.Tensor) -> torch.Tensor:
    SHARED_LIST.append(x.detach().mean(0))
    return x - sum(SHARED_LIST)


def write_into_global(model: Any, x: torch.Tensor) -> torch.Tensor:
    return average(SHARED_TABLE["means"][0], x)


@pytest.mark.parametrize(
    ("use", "name"), [(grow_global, "SHARED_LIST"), (write_into_global, "SHARED_TABLE")]
)
def test_a_global_that_forward_fills_for_the_next_step_is_refused(use: Any, name: str) -> None:
    with pytest.raises(TraceError, match=f"leaves values in {__name__}.{name}"):
        engine_of(Writes(use))
    assert SHARED_LIST == []
    assert torch.equal(SHARED_TABLE["means"][0], torch.zeros(4))


class Watching:
    """A hook that keeps what it sees, as scripts log activations."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def __call__(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        self.seen.append(output.detach().mean())


def test_what_a_hook_keeps_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model = Writes(lambda m, x: x)
    watching, beside = Watching(), list[int]()
    model.linear.register_forward_hook(watching)
    model.linear.register_forward_pre_hook(lambda module, inputs: beside.append(1))
    with caplog.at_level(logging.WARNING):
        engine_of(model)
    assert (
        caplog.text.count("forward keeps values in Watching.seen of a hook of linear, a list") == 1
    )
    assert caplog.text.count("forward keeps values in beside of a hook of linear, a list") == 1
    assert watching.seen == beside == []
