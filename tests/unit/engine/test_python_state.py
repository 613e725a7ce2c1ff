"""An engine follows what a loop changes in Python between two steps."""

from __future__ import annotations

import contextvars
import copy
import logging
import math
import os
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from merak.core import mesh
from merak.core.errors import TraceError, TrainingError
from merak.data import signature
from merak.engine.build import build_engine
from merak.engine.engine import Engine
from merak.engine.python_state import MANY
from merak.graph.ir.state_read import GLOBALS
from merak.graph.segment import build
from merak.graph.segment.build import GraphSource
from merak.graph.trace.state.outside import SETTINGS as SETTINGS_NOW
from merak.graph.trace.state.outside import Outside
from merak.graph.trace.state.places import Place
from merak.graph.weights.laid_out import Part, mark_laid_out
from merak.plan.engine_options import EngineOptions
from tests.tiers import one_in

pytestmark = pytest.mark.usefixtures("one_rank")


class Tempered(nn.Module):
    """A loss that a number scales, in torch or by Python's own functions."""

    def __init__(self, *, is_python: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.other = nn.Linear(4, 4)
        self.is_python = is_python
        self.power = 1.0
        self.mode = "mean"

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.other(self.linear(x).relu()).square()
        factor = math.exp(self.power) if self.is_python else self.power * 2
        reduced: torch.Tensor = getattr(out, self.mode)()
        return {"loss": reduced * factor}


def batch() -> dict[str, torch.Tensor]:
    return {"x": torch.arange(8.0).view(2, 4)}


def engine_of(model: nn.Module) -> Engine:
    columns = signature(batch()).columns
    return build_engine(GraphSource(model), columns, mesh.current_mesh(), EngineOptions())


def step(engine: Engine, number: int = 0) -> float:
    engine.optimizer_params.clear_gradients()
    return float(engine.train_step(number, [signature(batch()).columns], [batch()])[0])


def num_programs(engine: Engine) -> int:
    """The number of programs that have been made beside the first one."""
    return engine._state.program_for.num_made


@pytest.mark.parametrize("is_python", [False, True])
def test_a_changed_number_is_computed_with(
    is_python: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = Tempered(is_python=is_python)
    expected = copy.deepcopy(model)
    engine = engine_of(model)
    with caplog.at_level(logging.WARNING):
        for number in range(MANY + 2):
            model.power = expected.power = 1.0 + number / 4
            loss = expected(**batch())["loss"]
            assert step(engine, number) == pytest.approx(loss.item(), rel=1e-6)
            gradient = torch.autograd.grad(loss, expected.linear.weight)[0]
            torch.testing.assert_close(model.linear.weight.grad, gradient)
    # As an input it is traced once; else anew each time, after the trial as an input.
    assert num_programs(engine) == (MANY + 1 if is_python else 1)
    warned = [r.getMessage() for r in caplog.records if "traced anew" in r.getMessage()]
    assert len(warned) == is_python
    assert all("`factor = math.exp(self.power)" in text for text in warned)


class Counted(nn.Module):
    """A loss that a count scales, and shifts the rows of integers that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(8, 4)
        self.step = 0

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.rows((ids + int(ids.shape[0]) * self.step) % 8)
        return {"loss": found.square().mean() * min(1.0, (1 + self.step) / 4)}


def test_a_count_is_an_input_of_whole_numbers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Counted()
    expected = copy.deepcopy(model)
    ids = {"ids": torch.arange(3)}
    columns = signature(ids).columns
    engine = build_engine(GraphSource(model), columns, mesh.current_mesh(), EngineOptions())
    with caplog.at_level(logging.WARNING):
        for number in range(MANY + 2):
            model.step = expected.step = number
            loss = float(engine.train_step(number, [columns], [ids])[0])
            assert loss == pytest.approx(expected(**ids)["loss"].item(), rel=1e-6)
    assert num_programs(engine) == 1
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_what_is_no_number_is_warned_of_by_that_reason(caplog: pytest.LogCaptureFixture) -> None:
    model = Tempered()
    engine = engine_of(model)
    with caplog.at_level(logging.WARNING):
        for number in range(MANY + 1):
            model.mode = "mean" if number % 2 else "sum"
            step(engine, number)
    (warned,) = [r.getMessage() for r in caplog.records if "traced anew" in r.getMessage()]
    assert "since it is no number, which could be an input" in warned


class TwoNumbers(nn.Module):
    """A loss with a number that can be an input, and one that Python computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()
        self.first, self.second = 0.1, 1.0

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.linear(x.double()).square().mean()
        return {"loss": out * self.first * math.exp(self.second)}


def test_of_several_numbers_some_are_inputs() -> None:
    model = TwoNumbers()
    expected = copy.deepcopy(model)
    engine = engine_of(model)
    made = []
    for number in range(4):
        model.first = expected.first = 0.1 + number / 3
        if number in (1, 2):
            model.second = expected.second = 1.0 + number
        assert step(engine, number) == pytest.approx(expected(**batch())["loss"].item(), rel=1e-7)
        made.append(num_programs(engine))
    assert made[3] == made[2] == made[1] + 1


def test_variables_of_a_loss_function_are_followed() -> None:
    beta = 0.5

    def loss_fn(outputs: dict[str, torch.Tensor], batch: object) -> torch.Tensor:
        return outputs["loss"] * beta

    columns = signature(batch()).columns
    source = GraphSource(Tempered(), loss_fn)
    engine = build_engine(source, columns, mesh.current_mesh(), EngineOptions())
    first = step(engine)
    beta = 0.25
    assert step(engine) == pytest.approx(first / 2, rel=1e-6)
    beta = 1.0
    assert step(engine) == pytest.approx(2 * first, rel=1e-6)
    assert num_programs(engine) == 1


def test_evaluation_computes_with_it_too() -> None:
    model = Tempered()
    engine = engine_of(model)
    columns = signature(batch()).columns
    before = float(engine.evaluate([columns], [batch()])[0]["loss"])
    model.power = 3.0
    assert engine.columns(columns, training=False) == ("x",)
    assert engine.outputs(columns) == ("loss",)
    after = float(engine.evaluate([columns], [batch()])[0]["loss"])
    assert after == pytest.approx(3 * before, rel=1e-6)
    assert step(engine) == pytest.approx(after, rel=1e-6)


def test_a_model_in_parts_is_traced_once_for_a_change() -> None:
    model = Tempered()
    engine = engine_of(model)
    part = Part(frozenset(), {}, replace(mesh.current_mesh(), pp=2), is_sharded=False)
    mark_laid_out(model, part, runs_whole=False)  # as on one of several stages
    step(engine)
    model.mode = "sum"
    step(engine, 1)
    made = num_programs(engine)
    assert made > 0
    step(engine, 2)
    assert num_programs(engine) == made


def test_a_change_back_and_forth() -> None:
    model = Tempered()
    engine = engine_of(model)
    first = step(engine)
    model.mode = "sum"
    assert step(engine) == pytest.approx(8 * first, rel=1e-6)
    model.mode = "mean"
    assert step(engine) == pytest.approx(first, rel=1e-6)


def test_a_number_that_becomes_none_is_refused_with_its_line() -> None:
    model = Tempered()
    engine = engine_of(model)
    model.power = 2.0
    step(engine)
    model.power = None  # type: ignore[assignment]
    with pytest.raises(TraceError) as caught:
        step(engine)
    assert str(caught.value).startswith("model.power has changed from 2.0 to None, which forward")
    assert "else self.power * 2`" in str(caught.value)


def test_a_parameter_frozen_meanwhile_gets_no_gradient() -> None:
    model = Tempered()
    engine = engine_of(model)
    step(engine)
    assert model.other.bias.grad is not None
    model.linear.requires_grad_(False)
    step(engine)
    assert model.linear.weight.grad is None
    assert model.other.weight.grad is not None
    norm = torch.stack([model.other.weight.grad.norm(), model.other.bias.grad.norm()]).norm()
    assert float(engine.gradient_norm()) == pytest.approx(float(norm), rel=1e-6)
    model.linear.requires_grad_(True)
    step(engine)
    assert model.linear.weight.grad is not None


def test_a_parameter_frozen_from_the_start_stays_so() -> None:
    model = Tempered()
    model.other.bias.requires_grad_(False)
    engine = engine_of(model)
    step(engine)
    model.other.bias.requires_grad_(True)
    with pytest.raises(TrainingError, match=r"other\.bias was frozen when training began"):
        step(engine)


TABLE: dict[str, Any] = {"loss": {"scale": 1.0}, "weights": [torch.ones(4)]}
EXTRA: dict[str, float] = {}


class Configured(nn.Module):
    """A loss that globals and lists of its own decide, whose items are dicts and tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.stages: list[dict[str, float]] = [{"power": 1.0}]
        self.shifts = {"first": torch.zeros(4)}

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.linear(x) * TABLE["weights"][0] + self.shifts["first"]
        factor = TABLE["loss"]["scale"] * self.stages[0]["power"] * EXTRA.get("gain", 1.0)
        return {"loss": out.square().mean() * factor}


def change_nested(model: Any) -> None:
    TABLE["loss"]["scale"] = 2.0


def change_tensor(model: Any) -> None:
    TABLE["weights"][0] = torch.full((4,), 3.0)


def change_tensor_in_place(model: Any) -> None:
    TABLE["weights"][0].mul_(0.5)


def add_key(model: Any) -> None:
    EXTRA["gain"] = 5.0


def change_own(model: Any) -> None:
    model.stages[0]["power"] = 7.0


def change_own_tensor(model: Any) -> None:
    model.shifts["first"] = torch.ones(4)


@one_in(3)
@pytest.mark.parametrize(
    "change",
    [change_nested, change_tensor, change_tensor_in_place, add_key, change_own, change_own_tensor],
)
def test_items_of_lists_and_dicts_are_followed(
    change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TABLE, "loss", {"scale": 1.0})
    monkeypatch.setitem(TABLE, "weights", [torch.ones(4)])
    monkeypatch.setattr(f"{__name__}.EXTRA", {})
    model = Configured()
    engine = engine_of(model)
    before = step(engine)
    assert before == pytest.approx(model(**batch())["loss"].item())
    assert num_programs(engine) == 0  # and nothing is traced anew without a change
    change(model)
    expected = model(**batch())["loss"].item()
    assert expected != pytest.approx(before)
    assert step(engine, 1) == pytest.approx(expected)
    assert step(engine, 2) == pytest.approx(expected)


AMOUNT: ContextVar[float] = ContextVar("AMOUNT", default=1.0)


class ReadsOutside(nn.Module):
    """A loss that context, environment, and what hangs at a parameter and a buffer scale."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scales", torch.ones(4))
        self.linear.weight.gain = self.scales.gain = 1.0  # type: ignore[attr-defined, union-attr]

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        read = self.linear.weight.gain * self.scales.gain * AMOUNT.get()
        other = float(os.environ.get("MERAK_TEST_GAIN", "1"))
        return {"loss": self.linear(x).square().mean() * read * other}


def change_context(model: Any, patch: pytest.MonkeyPatch) -> None:
    AMOUNT.set(3.0)


def change_environment(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("MERAK_TEST_GAIN", "3")


def change_parameter(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.linear.weight.gain = 3.0


def change_buffer(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.scales.gain = 3.0


@one_in(3)
@pytest.mark.parametrize(
    "change", [change_context, change_environment, change_parameter, change_buffer]
)
def test_what_is_outside_of_modules_is_followed(
    change: Callable[[Any, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def losses() -> tuple[float, float, float]:
        engine = engine_of(model := ReadsOutside())
        before = step(engine)
        assert num_programs(engine) == 0
        change(model, monkeypatch)
        return before, step(engine, 1), step(engine, 2)

    before, *after = contextvars.copy_context().run(losses)
    assert after == pytest.approx([3 * before, 3 * before])


class ReadsSettings(nn.Module):
    """A loss that depends on torch's own settings: by a dtype, and by what its code asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        third = torch.full((4,), 1 / 3, device=x.device)
        asked = (
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision() != "highest",
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.cudnn_sdp_enabled(),
            torch.backends.cudnn.benchmark,
            torch.backends.mha.get_fastpath_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
            torch.get_default_device().type == "meta",
        )
        scale = math.prod(2 + number for number, is_so in enumerate(asked) if is_so)
        return {"loss": (self.linear(x) * third).square().mean() * scale}


SETTINGS: dict[str, Callable[[], object]] = {
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "default device": lambda: torch.set_default_device("meta:0"),
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
    "fill": lambda: setattr(torch.utils.deterministic, "fill_uninitialized_memory", False),
    "precision": lambda: torch.set_float32_matmul_precision("medium"),
    "flash": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "cudnn attention": lambda: torch.backends.cuda.enable_cudnn_sdp(False),
    "benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "fast path": lambda: torch.backends.mha.set_fastpath_enabled(False),
}


@one_in(4)
@pytest.mark.parametrize("change", SETTINGS.values(), ids=SETTINGS)
def test_settings_of_torch_are_followed_there_and_back(change: Callable[[], object]) -> None:
    engine = engine_of(model := ReadsSettings())
    own, ones = copy.deepcopy(model), batch()
    columns = [signature(ones).columns]
    before = Place("", SETTINGS_NOW, SETTINGS_NOW.now(), Outside, GLOBALS)

    def losses(number: int) -> tuple[float, float]:
        engine.optimizer_params.clear_gradients()
        expected = own(**ones)["loss"].item()
        return float(engine.train_step(number, columns, [ones])[0]), expected

    found = [losses(0)]
    assert num_programs(engine) == 0
    try:
        change()
        found += [losses(1), losses(2)]
    finally:
        before.restore()
    found.append(losses(3))
    assert num_programs(engine) == 2
    assert all(mine == pytest.approx(its) for mine, its in found)
    assert found[1] == found[2] != found[0] == found[3]


class Activated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.softmax(self.linear(x), -1).square().mean()}


def test_a_function_put_in_the_place_of_torchs_is_followed_there_and_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_of(model := Activated())
    old, own, ones = nn.functional.softmax, copy.deepcopy(model), batch()
    columns = [signature(ones).columns]

    def losses(number: int) -> tuple[float, float]:
        engine.optimizer_params.clear_gradients()
        expected = own(**ones)["loss"].item()
        return float(engine.train_step(number, columns, [ones])[0]), expected

    found = [losses(0)]
    with monkeypatch.context() as patch:
        patch.setattr(nn.functional, "softmax", lambda *given, **named: 3 * old(*given, **named))
        found += [losses(1), losses(2)]
    found.append(losses(3))
    assert num_programs(engine) == 2
    assert all(mine == pytest.approx(its) for mine, its in found)
    assert found[1] == found[2] != found[0] == found[3]


class Masked(nn.Module):
    """Its attention has a mask of its own, larger than what is compared value by value."""

    def __init__(self, is_buffer: bool) -> None:
        super().__init__()
        self.project, mask = nn.Linear(4, 12), torch.ones(80, 80).tril().bool()
        if is_buffer:
            self.register_buffer("mask", mask)
        else:
            self.mask = mask

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        heads = self.project(x.view(1, 1, 2, 4)).chunk(3, -1)
        found = nn.functional.scaled_dot_product_attention(*heads, attn_mask=self.mask[:2, :2])
        return {"loss": found.square().mean()}


@pytest.mark.parametrize("is_buffer", [True, False])
def test_a_mask_that_was_plain_causality(is_buffer: bool) -> None:
    model = Masked(is_buffer).double()
    eager = copy.deepcopy(model)
    data = {"x": batch()["x"].double()}
    columns = signature(data).columns
    engine = build_engine(GraphSource(model), columns, mesh.current_mesh(), EngineOptions())

    def losses() -> tuple[float, float]:
        engine.optimizer_params.clear_gradients()
        (loss,) = engine.train_step(0, [columns], [data])
        return float(loss), eager(**data)["loss"].item()

    found, expected = losses()
    assert found == pytest.approx(expected, rel=1e-6)
    with mock.patch.object(build, "trace_source", None):  # such as one that a checkpoint has
        for mask in (model.mask.clone(), model.mask):
            model.mask = mask
            mask.copy_(mask.clone())
            assert losses()[0] == found
    for one in (model, eager):
        one.mask[0, 1] = True
    assert losses()[0] == pytest.approx(losses()[1], rel=1e-6) and losses()[0] != found
    for one in (model, eager):
        one.mask = torch.ones(80, 80).tril().bool()
    assert losses()[0] == pytest.approx(expected, rel=1e-6)
