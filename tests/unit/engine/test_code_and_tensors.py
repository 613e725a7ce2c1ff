"""An engine follows plain tensors, late attributes and replaced code between two steps."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from merak.core.errors import TraceError
from merak.engine.python_state import MANY
from tests.tiers import one_in
from tests.unit.engine.test_python_state import batch, engine_of, num_programs, step

pytestmark = pytest.mark.usefixtures("one_rank")


OFFSET = torch.zeros(4)


class Options:
    """A class whose attributes are options, which may come later."""


class Config:
    """An object that may get attributes later."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        nn.init.constant_(self.linear.weight, 0.25)  # no unit is dead, so that every change tells
        nn.init.ones_(self.linear.bias)
        self.act = torch.relu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.act(self.linear(x))
        return out


class Model(nn.Module):
    """A loss that depends on tensors, functions, and attributes that are not there at first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()
        self.norm = nn.Identity()
        self.acts = nn.Sequential(nn.Tanh(), nn.Softplus())
        self.t = torch.tensor([1.0, 2.0, 3.0, 4.0])
        self.config = Config()
        self.options = SimpleNamespace(power=2)
        self.weights = {"a": 1.0}

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * getattr(self.config, "scale", 1.0)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.norm(self.acts(self.layer(x))) * self.t
        out = self.scaled(out) ** getattr(self.options, "late", self.options.power)
        if hasattr(self, "shift"):
            out = out + self.shift
        if hasattr(type(self), "is_doubled"):
            out = out * 2
        out = out * getattr(Options, "gain", 1.0) * sum(self.weights.values())
        return {"loss": (out + OFFSET).mean()}


def other_forward(self: Layer, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(self.linear(x))


def new_forward(model: Any) -> None:
    model.layer.forward = other_forward.__get__(model.layer)


def new_method(model: Any) -> None:
    model.scaled = lambda x: x * 7


def in_reverse(modules: nn.Sequential) -> dict[str, nn.Module]:
    return dict(reversed(modules._modules.items()))


CHANGES: dict[str, Callable[[Any], object]] = {
    "a tensor replaced": lambda m: setattr(m, "t", torch.tensor([4.0, 0.0, 1.0, 2.0])),
    "a tensor of another shape": lambda m: setattr(m, "t", torch.tensor(5.0)),
    "a tensor written": lambda m: m.t.mul_(3.0),
    "a global tensor": lambda m: OFFSET.fill_(OFFSET[0] + 2.0),
    "a late attribute of a config": lambda m: setattr(m.config, "scale", 3.0),
    "of a namespace": lambda m: setattr(m.options, "late", 3),
    "of a module": lambda m: setattr(m, "shift", 3.0),
    "of the model's class": lambda m: setattr(type(m), "is_doubled", True),
    "of a global class": lambda m: setattr(Options, "gain", 4.0),
    "a late key": lambda m: m.weights.update(b=3.0),
    "a forward": new_forward,
    "a method": new_method,
    "a function": lambda m: setattr(m.layer, "act", torch.sigmoid),
    "a hook": lambda m: m.layer.register_forward_hook(lambda *a: a[2] * 5),
    "a hook before": lambda m: m.layer.register_forward_pre_hook(lambda _, a: (a[0] * 5,)),
    "another order of children": lambda m: setattr(m.acts, "_modules", in_reverse(m.acts)),
    "one more child": lambda m: m.acts.append(nn.Sigmoid()),
    "one child less": lambda m: m.acts.pop(1),
    "the forward of a class": lambda m: setattr(nn.Softplus, "forward", lambda _, x: x * 3),
    "a child without weights": lambda m: setattr(m, "norm", nn.Softplus()),
}


@pytest.fixture
def clean_classes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(nn.Softplus, "forward", nn.Softplus.forward)  # to be put back
    yield
    OFFSET.zero_()
    for cls, name in ((Model, "is_doubled"), (Options, "gain")):
        if name in vars(cls):
            delattr(cls, name)


@one_in(4)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_is_computed_with(change: Callable[[Any], object], clean_classes: None) -> None:
    model = Model()
    expected = copy.deepcopy(model)
    engine = engine_of(model)
    first = expected(**batch())["loss"].item()
    assert step(engine) == step(engine) == pytest.approx(first, rel=1e-6)
    assert num_programs(engine) == 0
    change(model)
    change(expected)
    loss = expected(**batch())["loss"]
    assert loss.item() != pytest.approx(first, rel=1e-3)
    assert step(engine) == step(engine) == pytest.approx(loss.item(), rel=1e-6)
    assert num_programs(engine) == 1
    gradient = torch.autograd.grad(loss, expected.layer.linear.weight)[0]
    assert step(engine) == pytest.approx(loss.item(), rel=1e-6)
    torch.testing.assert_close(model.layer.linear.weight.grad, gradient)


def test_what_changes_nothing_traces_nothing() -> None:
    model = Model()
    engine = engine_of(model)
    first = step(engine)
    model.t = model.t.clone()
    model.layer.linear.weight.data = model.layer.linear.weight.data.clone()
    model.never_read = 1.0  # type: ignore[assignment]
    assert step(engine) == first
    assert num_programs(engine) == 0


def test_a_tensor_of_every_step_is_better_a_buffer(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    engine = engine_of(model)
    with caplog.at_level(logging.WARNING):
        for number in range(MANY):
            model.t = torch.full((4,), 2.0 + number)
            step(engine, number)
    (warned,) = [r.getMessage() for r in caplog.records if "traced anew" in r.getMessage()]
    assert warned.startswith(f"model.t has changed {MANY} times")
    assert "register_buffer" in warned
    assert "`out = self.norm(self.acts(self.layer(x))) * self.t`" in warned


def test_a_change_that_cannot_be_traced_is_refused_with_its_line() -> None:
    model = Model()
    engine = engine_of(model)
    model.t = torch.ones(3)
    with pytest.raises(TraceError) as caught:
        step(engine)
    assert str(caught.value).startswith(
        "model.t has changed from tensor([1.0, 2.0, 3.0, 4.0]) to tensor([1.0, 1.0, 1.0]), which "
        "forward reads at "
    )
    assert "`out = self.norm(self.acts(self.layer(x))) * self.t`" in str(caught.value)


def test_new_weights_are_refused() -> None:
    model = Model()
    engine = engine_of(model)
    model.norm = nn.Linear(4, 4)  # type: ignore[assignment]
    with pytest.raises(TraceError, match=r"model\.norm has changed from Identity to Linear, with"):
        step(engine)


class Written(nn.Module):
    """A forward that writes into plain tensors: a sum over steps, a scratch, a note of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.total = torch.zeros(())
        self.scratch = torch.zeros(4)
        self.noted = torch.zeros(())

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.total.add_(1)
        torch.mul(x[0], 2, out=self.scratch)
        loss = (self.linear(x) * self.scratch).mean() * self.total
        self.noted.copy_(loss.detach())
        return {"loss": loss}


def test_tensors_that_forward_writes_are_as_in_eager_code() -> None:
    model = Written()
    expected = copy.deepcopy(model)
    engine = engine_of(model)
    assert model.total.item() == 0  # the trace has left it as it was
    for number in range(3):
        loss = expected(**batch())["loss"].item()
        assert step(engine, number) == pytest.approx(loss, rel=1e-6)
        for name in ("total", "scratch", "noted"):
            torch.testing.assert_close(getattr(model, name), getattr(expected, name))
    assert num_programs(engine) == 0


class WrittenOnce(Written):
    """A forward whose first call is another than those after it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_ready = False

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        if not self.is_ready:
            self.total.add_(3)
            self.is_ready = True
        return {"loss": self.linear(x).mean() * self.total}


def test_a_tensor_that_the_first_call_alone_writes_is_refused_until_then() -> None:
    model = WrittenOnce()
    with pytest.raises(
        TraceError, match=r"`self.is_ready = True`.*run one forward before training"
    ):
        engine_of(model)
    expected = model(**batch())["loss"].item()
    assert step(engine_of(model)) == pytest.approx(expected, rel=1e-6)


TOTAL = torch.zeros(())


class WritesGlobal(Written):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        TOTAL.add_(1)
        return {"loss": self.linear(x).mean() * TOTAL}


def test_a_global_tensor_that_forward_writes_is_refused() -> None:
    with pytest.raises(TraceError, match=r"forward leaves values in .*TOTAL, at .*TOTAL.add_"):
        engine_of(WritesGlobal())
