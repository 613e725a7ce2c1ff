from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from merak.core.errors import TraceError
from merak.core.tensor_meta import TensorMeta
from merak.graph.cache.json_values import Writer
from merak.graph.ir.state_read import StateRead
from merak.graph.segment.build import GraphSource, build_graph
from merak.graph.trace.state.functions import function_reads
from merak.graph.trace.state.slots import MISSING, Slot
from merak.graph.trace.state.watch import StateWatch, sentence

SCALE = 2.0
COLUMNS = {"x": TensorMeta((2, 4), torch.float32)}


@dataclass
class Inner:
    power: int = 2
    unread: int = 3


@dataclass
class Config:
    inner: Inner = field(default_factory=Inner)


class Stateful(nn.Module):
    shift = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.1)
        self.weight = 1.0
        self.weights = {"a": 1.0, "b": 2.0}
        self.names = ["x"]
        self.config = Config()
        self.options = SimpleNamespace(bias=0.5)
        self.unread = 1.0
        self.num_calls = 0
        self.longest = None

    @property
    def doubled(self) -> float:
        return 2 * self.weight

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.num_calls += 1
        self.longest = max(self.longest or 0, x.shape[1])
        out = self.drop(self.linear(x)) ** self.config.inner.power * self.weights["a"]
        out = scaled(out) + self.options.bias + self.shift if self.names else out
        return {"loss": out.mean() * self.doubled}


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


def reads(model: nn.Module) -> dict[str, StateRead]:
    graph = build_graph(GraphSource(model), COLUMNS, training=True)
    return {str(read): read for read in graph.reads}


def test_what_forward_reads_is_recorded_with_its_line() -> None:
    found = reads(Stateful())
    assert found.keys() == {
        "model.drop.inplace",
        "model.drop.p",
        "model.weight",
        "model.weights",
        "model.weights['a']",
        "model.weights['b']",
        "model.names",
        "model.config.inner.power",
        "model.options.bias",
        "model.options.__dict__",
        "model.shift",
    }
    file, _, number = found["model.weight"].source.rpartition(":")
    with open(file) as text:
        assert text.read().splitlines()[int(number) - 1].strip() == "return 2 * self.weight"


def test_recording_leaves_classes_as_they_were() -> None:
    reads(Stateful())
    assert "__getattribute__" not in vars(nn.Module)
    assert "__getattribute__" not in vars(Config)
    assert Stateful().weight == 1.0


def test_reads_can_be_stored_with_a_graph() -> None:
    for read in reads(Stateful()).values():
        Writer().write(read)


def loss_with(beta: float) -> tuple[Callable[..., Any], Callable[[float], None]]:
    def loss_fn(outputs: Any, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = outputs["loss"] * beta
        return loss

    def change(value: float) -> None:
        nonlocal beta
        beta = value

    return loss_fn, change


def test_globals_and_closures_of_own_functions_are_found() -> None:
    found = {str(read) for read in function_reads(Stateful(), loss_with(0.5)[0])}
    assert found == {f"{__name__}.SCALE", "the loss function.beta"}


class Options:
    """A class whose attributes are options."""

    gain = 1.0
    unread = 2.0


def factor(value: float) -> tuple[Callable[..., Any], Callable[[float], None]]:
    def multiply(x: torch.Tensor) -> torch.Tensor:
        return x * value

    def change(new: float) -> None:
        nonlocal value
        value = new

    return multiply, change


multiplied, set_factor = factor(1.0)


def test_closures_and_classes_that_forward_reaches_are_watched() -> None:
    local = 1.0

    class Local(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return multiplied(x) * local * Options.gain  # type: ignore[no-any-return]

    model = nn.Sequential(Local())
    watch = StateWatch(model, None)
    found = function_reads(model, None)
    watch.add(found)
    assert {str(read) for read in found} == {
        f"{__name__}.multiplied.value",
        f"{__name__}.Options.gain",
        "model.0.forward.__func__.local",
    }
    local = 3.0
    set_factor(2.0)
    Options.gain = 0.5
    try:
        assert {change.new for change in watch.changes()} == {2.0, 0.5, 3.0}
    finally:
        Options.gain = 1.0
        set_factor(1.0)


def test_only_what_has_changed_is_said() -> None:
    model = Stateful()
    loss_fn, change = loss_with(0.5)
    watch = StateWatch(model, loss_fn)
    watch.add((*reads(model).values(), *function_reads(model, loss_fn)))
    assert watch.changes() == []
    model.weight, model.unread, model.num_calls = 3.0, 3.0, 7
    model.weights["b"] = 4.0
    model.names.append("y")
    model.config.inner = Inner(power=3)
    change(0.25)
    changes = {sentence(change) for change in watch.changes()}
    assert changes == {
        "model.weight has changed from 1.0 to 3.0",
        "model.weights['b'] has changed from 2.0 to 4.0",
        "model.names has changed from ['x'] to ['x', 'y']",
        "model.config.inner.power has changed from 2 to 3",
        "the loss function.beta has changed from 0.5 to 0.25",
    }
    watch.accept(watch.changes())
    assert watch.changes() == []
    del model.weights["b"]
    model.shift = math.nan
    changes = {sentence(change) for change in watch.changes()}
    assert changes == {
        "model.weights has changed from the keys ['a', 'b'] to the keys ['a']",
        "model.weights['b'] has changed from 4.0 to nothing",
        "model.shift has changed from 0.0 to nan",
    }
    watch.accept(watch.changes())
    assert watch.changes() == []


@pytest.mark.parametrize(
    "root,path,steps,value",
    [
        ("model", "", ("weight",), 1.0),
        ("model", "drop", ("p",), 0.1),
        ("model", "", ("weights", "[a]"), 1.0),
        ("model", "", ("config", "inner", "power"), 2),
        ("globals", __name__, ("[SCALE]",), 2.0),
        ("loss", "", ("(beta)",), 0.5),
    ],
)
def test_a_slot_is_read_and_set(root: str, path: str, steps: tuple[str, ...], value: Any) -> None:
    model, loss_fn = Stateful(), loss_with(0.5)[0]
    slot = Slot(StateRead(root, path, steps, ""), model, loss_fn)
    assert slot.get() == value
    slot.set(9.0)
    assert slot.get() == 9.0
    slot.set(value)
    assert slot.get() == value


def test_a_class_attribute_is_set_on_the_object_alone() -> None:
    model = Stateful()
    slot = Slot(StateRead("model", "", ("shift",), ""), model, None)
    assert slot.own() is MISSING
    slot.set(1.0)
    assert (model.shift, Stateful.shift) == (1.0, 0.0)
    slot.set(MISSING)
    assert model.shift == 0.0


def test_a_place_that_is_not_there_is_said() -> None:
    with pytest.raises(LookupError):
        Slot(StateRead("model", "gone", ("weight",), ""), Stateful(), None)


def test_numbers_can_be_inputs() -> None:
    model = Stateful()
    read = reads(model)["model.weight"]
    source = GraphSource(model, numbers={"model.weight": Slot(read, model, None)})
    number = {"model.weight": TensorMeta((), torch.float32)}
    graph = build_graph(source, COLUMNS | number, training=True)
    used = {name for segment in graph.segments for name in segment.columns}
    assert "model.weight" in used | set(graph.prologue.columns)
    assert "model.weight" not in {str(found) for found in graph.reads}
    assert model.weight == 1.0


class Annealing(nn.Module):
    def __init__(self, *, computes: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.num_steps = 0
        self.num_calls = 0
        self.computes = computes

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.num_calls += 1
        self.num_steps += 1
        factor = min(1.0, self.num_steps / 10) if self.computes else 1.0
        return {"loss": self.linear(x).mean() * factor}


def test_a_counter_that_forward_computes_with_is_refused() -> None:
    with pytest.raises(TraceError) as caught:
        build_graph(GraphSource(Annealing(computes=True)), COLUMNS, training=True)
    assert str(caught.value).startswith("forward leaves values in model.num_")
    assert "`self.num_steps += 1`" in str(caught.value)
    assert "register_buffer" in str(caught.value)


def test_a_counter_that_is_only_counted_is_not() -> None:
    model = Annealing(computes=False)
    build_graph(GraphSource(model), COLUMNS, training=True)
    assert (model.num_steps, model.num_calls) == (0, 0)
