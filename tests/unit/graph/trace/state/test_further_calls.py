"""What a forward leaves in Python state: refused where the next computes with it, else traced."""

from __future__ import annotations

import logging
import os
from collections import UserDict
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from merak.core.errors import TraceError
from merak.core.tensor_meta import TensorMeta
from merak.graph.segment.build import GraphSource, build_graph
from merak.graph.trace.state.outside import torch_settings
from merak.graph.trace.state.snapshot import Snapshot
from tests.tiers import one_in

COLUMNS = {"x": TensorMeta((4, 4), torch.float32)}
COUNT = 0
COUNTS = np.zeros(2)
CALLS = ContextVar("calls", default=0)
Use = Callable[[Any, Tensor], Tensor]


class Held:
    """An object that is no module."""

    def __init__(self) -> None:
        self.calls = 0
        self.mean: Tensor | None = None


class Scaled:
    def __init__(self) -> None:
        self.calls = 0

    def scaled(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


@dataclass(slots=True)
class HeldInSlots:
    calls: int = 0


class Described:
    """A descriptor that keeps the values of all objects itself."""

    def __init__(self) -> None:
        self.values: dict[int, int] = {}

    def __get__(self, owner: Any, cls: Any = None) -> int:
        return self.values.get(id(owner), 0)

    def __set__(self, owner: Any, value: int) -> None:
        self.values[id(owner)] = value


class Leaves(nn.Module):
    total = 0
    described = Described()

    def __init__(self, use: Use) -> None:
        super().__init__()
        self.use, self.linear = use, nn.Linear(4, 4)
        self.register_buffer("centre", torch.zeros(4))
        self.is_first, self.calls, self.held = True, 0, Held()
        self.last: Tensor | None = None
        self.objects, self.tables = [Held()], dict[Any, Tensor]()
        self.numbers = iter([1.0, 2.0] * 99)
        self.counted = counting()
        self.cos = self.sin = None
        self.grown, self.act, self.scaled = nn.ModuleList(), nn.Tanh(), Scaled().scaled
        self.linear.weight.calls = 0  # type: ignore[attr-defined]
        self.folder, self.weak = "", WeakKeyDictionary({self.linear: 1})
        counted = {"calls": 0}
        self.places = {
            "slots": HeldInSlots(),
            "array": np.zeros(2),
            "container": UserDict(calls=0),
            "deep": [[[[[[0]]]]]],
            "generator": np.random.default_rng(0),
            "view": MappingProxyType(counted),
            "memory": memoryview(bytearray(2)),
        }
        self.count = lambda: counted.update(calls=counted["calls"] + 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.use(self, torch.tanh(self.linear(x))).square().mean()}


def counting() -> Callable[[Tensor], Tensor]:
    calls = 0

    def counted(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x * calls

    return counted


def flag(model: Any, x: Tensor) -> Tensor:
    x = 2 * x if model.is_first else x
    model.is_first = False
    return x


def late_centre(model: Any, x: Tensor) -> Tensor:
    if not model.is_first:
        model.centre.copy_(0.9 * model.centre + 0.1 * model.last)
    model.is_first, model.last = False, x.detach().mean(0)
    return x - model.centre


def none_to_tensor(model: Any, x: Tensor) -> Tensor:
    out = x if model.last is None else x - model.last
    model.last = x.detach().mean(0)
    return out


def of_the_first_batch(model: Any, x: Tensor) -> Tensor:
    if model.last is None:
        model.last = (x > 0).float()
    return x * model.last


def held_object(model: Any, x: Tensor) -> Tensor:
    model.held.calls += 1
    return x * model.held.calls


def object_in_a_list(model: Any, x: Tensor) -> Tensor:
    model.objects[0].calls += 1
    return x * model.objects[0].calls


def of_the_class(model: Any, x: Tensor) -> Tensor:
    type(model).total += 1
    return x * model.total


def of_a_function(model: Any, x: Tensor) -> Tensor:
    own: Any = of_a_function
    own.calls = getattr(own, "calls", 0) + 1
    return x * own.calls


def of_a_global(model: Any, x: Tensor) -> Tensor:
    global COUNT
    COUNT += 1
    return x * COUNT


def of_a_closure(model: Any, x: Tensor) -> Tensor:
    return model.counted(x)  # type: ignore[no-any-return]


def of_an_iterator(model: Any, x: Tensor) -> Tensor:
    return x * next(model.numbers)


def runs_out(model: Any, x: Tensor) -> Tensor:
    model.objects.pop()
    return x


def decides_later(model: Any, x: Tensor) -> Tensor:
    if model.last is not None and model.last.mean() > 0:
        x = 2 * x
    model.last = x.detach()
    return x


def counts_in_slots(model: Any, x: Tensor) -> Tensor:
    model.places["slots"].calls += 1
    return x * model.places["slots"].calls


def counts_in_an_array(model: Any, x: Tensor) -> Tensor:
    model.places["array"][0] += 1
    return x * float(model.places["array"][0])


def counts_in_a_global_array(model: Any, x: Tensor) -> Tensor:
    COUNTS[1] += 1
    return x * float(COUNTS[1])


def counts_in_a_container(model: Any, x: Tensor) -> Tensor:
    model.places["container"]["calls"] += 1
    return x * model.places["container"]["calls"]


def counts_by_module(model: Any, x: Tensor) -> Tensor:
    found = model.weak.get(model.linear, 1)
    model.weak[model.linear] = found + 1
    return x * found


def counts_deep_inside(model: Any, x: Tensor) -> Tensor:
    model.places["deep"][0][0][0][0][0][0] += 1
    return x * model.places["deep"][0][0][0][0][0][0]


def counts_in_a_default(model: Any, x: Tensor, calls: list[int] = [0]) -> Tensor:  # noqa: B006
    calls[0] += 1
    return x * calls[0]


def draws_of_a_generator(model: Any, x: Tensor) -> Tensor:
    return x * model.places["generator"].random()


def counts_in_a_descriptor(model: Any, x: Tensor) -> Tensor:
    model.described += 1
    return x * model.described


def leaves_another_mode(model: Any, x: Tensor) -> Tensor:
    x = 2 * x if model.linear.training else x
    model.linear.training = False
    return x


def adds_hooks(model: Any, x: Tensor) -> Tensor:
    model.linear.register_forward_hook(lambda *_: None)
    return x * len(model.linear._forward_hooks)


def counts_in_a_context(model: Any, x: Tensor) -> Tensor:
    CALLS.set(CALLS.get() + 1)
    return x * CALLS.get()


def counts_in_the_environment(model: Any, x: Tensor) -> Tensor:
    os.environ["CALLS_OF_A_TEST"] = str(int(os.environ.get("CALLS_OF_A_TEST", "0")) + 1)
    return x * int(os.environ["CALLS_OF_A_TEST"])


def counts_in_a_file(model: Any, x: Tensor) -> Tensor:
    file = Path(model.folder, "calls.txt")
    file.write_text(file.read_text() + "." if file.exists() else ".")
    return x * len(file.read_text())


def counts_behind_a_view(model: Any, x: Tensor) -> Tensor:
    model.count()
    return x * model.places["view"]["calls"]


def counts_in_memory(model: Any, x: Tensor) -> Tensor:
    model.places["memory"][0] += 1
    return x * model.places["memory"][0]


def counts_in_a_method(model: Any, x: Tensor) -> Tensor:
    return model.scaled(x)  # type: ignore[no-any-return]


def counts_on_a_parameter(model: Any, x: Tensor) -> Tensor:
    model.linear.weight.calls += 1
    return x * model.linear.weight.calls


def counts_on_a_buffer(model: Any, x: Tensor) -> Tensor:
    model.centre.calls = getattr(model.centre, "calls", 0) + 1
    return x * model.centre.calls


def adds_modules(model: Any, x: Tensor) -> Tensor:
    model.grown.append(nn.Identity())
    return x * len(model.grown)


def replaces_a_module(model: Any, x: Tensor) -> Tensor:
    model.act = nn.Identity() if isinstance(model.act, nn.Tanh) else nn.Tanh()
    return model.act(x)  # type: ignore[no-any-return]


def removes_a_module(model: Any, x: Tensor) -> Tensor:
    if hasattr(model, "act"):
        x = 2 * x
        del model.act
    return x


def late_buffer(model: Any, x: Tensor) -> Tensor:
    if not hasattr(model, "mean"):
        model.register_buffer("mean", torch.zeros(4))
    x = x - model.mean
    model.mean.copy_(x.detach().mean(0))
    return x


def builds_a_layer(model: Any, x: Tensor) -> Tensor:
    if model.last is None:
        model.last = nn.Linear(x.shape[-1], 4)
    return model.last(x)  # type: ignore[no-any-return]


def builds_a_parameter(model: Any, x: Tensor) -> Tensor:
    if not hasattr(model, "gain"):
        model.register_parameter("gain", nn.Parameter(torch.ones(4)))
    return x * model.gain  # type: ignore[no-any-return]


def sets_the_precision(model: Any, x: Tensor) -> Tensor:
    torch.set_float32_matmul_precision("medium")
    return x


def sets_a_flag_of_a_backend(model: Any, x: Tensor) -> Tensor:
    torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
    return x


def leaves_gradients_off(model: Any, x: Tensor) -> Tensor:
    x = 2 * x if torch.is_grad_enabled() else x
    torch.set_grad_enabled(False)
    return x


def leaves_another_type(model: Any, x: Tensor) -> Tensor:
    x = x * torch.zeros(4).add(2)
    torch.set_default_dtype(torch.float64)
    return x


def fills_by_the_batch(model: Any, x: Tensor) -> Tensor:
    if model.is_first:
        model.centre, model.is_first = x.detach().mean(0), False
    return x - model.centre


def fills_by_weights(model: Any, x: Tensor) -> Tensor:
    if model.is_first:
        model.centre, model.is_first = model.linear.weight.detach().mean(0), False
    return x - model.centre


def doubles_once(model: Any, x: Tensor) -> Tensor:
    if model.is_first:
        model.centre, model.is_first = 2 * model.centre + 1, False
    return x - model.centre


def draws_once(model: Any, x: Tensor) -> Tensor:
    if model.is_first:
        model.centre, model.is_first = torch.rand(4), False
    return x - model.centre


REFUSED: dict[Use, str] = {
    fills_by_the_batch: "values in model.is_first, at .*: `model.centre, model.is_first = x",
    fills_by_weights: "values in model.is_first, at .*: `model.centre, model.is_first = model.lin",
    doubles_once: "values in model.is_first, at .*: `model.centre, model.is_first = 2",
    draws_once: "values in model.is_first, at .*: `model.centre, model.is_first = torch.rand",
    counts_in_a_context: "the context variable calls, at .*: `CALLS.set.*next call computes",
    counts_in_the_environment: r"os.environ.'CALLS_OF_A_TEST'., at .*: `os.environ.*= str",
    counts_in_a_file: "the file .*calls.txt, at .*: `file.write_text.*next call computes",
    counts_behind_a_view: r"model.places.'view'..'calls'., at .*: `return x . model.places",
    counts_in_memory: r"model.places.'memory'..0., at .*: `model.places",
    counts_in_a_method: r"model.scaled.calls, at .*: `self.calls \+= 1",
    counts_on_a_parameter: r"model.linear.weight.calls, at .*: `model.linear.weight.calls \+= 1",
    counts_on_a_buffer: "model.centre.calls, at .*: `model.centre.calls = ",
    adds_modules: "model.grown.0, at .*: `model.grown.append",
    replaces_a_module: "model.act, at .*: `model.act = ",
    removes_a_module: "model.act, at .*: `del model.act.*run one forward before",
    late_buffer: "model.mean, at .*: `model.register_buffer",
    builds_a_layer: "makes model.last, at .*: `model.last = nn.Linear.*make it in __init__",
    builds_a_parameter: "makes model.gain, at .*: `model.register_parameter",
    sets_the_precision: "torch.set_float32_matmul_precision, at .*: `torch.set_.*leaves it so",
    sets_a_flag_of_a_backend: "torch.backends.cudnn.benchmark, at .*: `torch.backends.*leaves it",
    leaves_gradients_off: "torch.set_grad_enabled, at .*: `torch.set_grad_enabled.False.*leaves",
    leaves_another_type: "torch.set_default_dtype, at .*: `torch.set_default_dtype.*leaves it",
    counts_in_slots: r"model.places.'slots'..calls, at .*calls \+= 1",
    counts_in_an_array: r"model.places.'array'., at .*: `model.places..array",
    counts_in_a_global_array: "COUNTS, at .*: `COUNTS",
    counts_in_a_container: r"model.places.'container'..data.'calls'., at .*: `model.places",
    counts_by_module: r"model.weak.data.*, at .*: `found = model.weak",
    counts_deep_inside: r"model.places.'deep'.(.0.){6}, at ",
    counts_in_a_default: "defaults of counts_in_a_default.*, at .*: `def counts_in_a_default",
    draws_of_a_generator: r"model.places.'generator'., at .*: `return x . model.places",
    counts_in_a_descriptor: "described.* and its next call",
    leaves_another_mode: "model.linear.training, at .*: `model.linear.training = False`",
    adds_hooks: "model.linear._forward_hooks.* and its next call",
    flag: "values in model.is_first, at .*: `model.is_first = False`.*run one forward before",
    late_centre: "values in model.is_first, at .*: `model.is_first, model.last = ",
    none_to_tensor: "values in model.last, at .*: `model.last = x",
    of_the_first_batch: "values in model.last, at .*: `model.last = .x > 0",
    held_object: "values in model.held.calls, at .*: `model.held.calls \\+= 1",
    object_in_a_list: r"values in model.objects.0..calls, at .*: `model.objects",
    of_the_class: "values in Leaves.total, at .*: `type.model..total",
    of_a_function: "values in model.use.calls, at .*: `own.calls = getattr",
    of_a_global: "values in .*COUNT, at .*: `COUNT ",
    of_a_closure: "values in model.counted.calls, at .*: `calls ",
    of_an_iterator: "values in model.numbers, at .*: `return x . next.model.numbers.`, and its",
    runs_out: "values in model.objects, and its next call cannot run.*: `model.objects.pop",
    decides_later: "values in model.last, .*cannot run.*cannot be traced at .*: `if model.last is",
}


def built(use: Use, folder: str = "") -> Leaves:
    model = Leaves(use)
    model.folder = folder
    build_graph(GraphSource(model), COLUMNS, training=True)
    return model


@one_in(4)
@pytest.mark.parametrize("use", REFUSED, ids=lambda use: use.__name__)
def test_what_the_next_call_computes_with_is_refused_with_its_line(
    use: Use, tmp_path: Path
) -> None:
    settings, environment = torch_settings(), dict(os.environ)
    with pytest.raises(TraceError, match=REFUSED[use]):
        built(use, str(tmp_path))
    assert (Leaves.total, COUNT, getattr(of_a_function, "calls", 0)) == (0, 0, 0)
    assert not COUNTS.any()
    assert (torch_settings(), dict(os.environ), CALLS.get()) == (settings, environment, 0)


@one_in(4)
@pytest.mark.parametrize(
    ("is_late", "value"),
    [
        (lambda calls: calls > 1000, 1000),
        (lambda calls: calls == 70, 69),
        (lambda calls: calls % 50 == 0, 49),
        (lambda calls: min(1.0, calls / 10 - 4) > 0.5, 45),
    ],
)
def test_a_counter_that_decides_much_later_is_refused(
    is_late: Callable[[int], bool], value: int
) -> None:
    def curriculum(model: Any, x: Tensor) -> Tensor:
        model.calls += 1
        return 2 * x if is_late(model.calls) else x

    with pytest.raises(TraceError, match=f"counts in model.calls.*something else once .* {value},"):
        built(curriculum)


def warns_once(model: Any, x: Tensor) -> Tensor:
    if model.is_first:
        logging.getLogger(__name__).info("hello")
        model.is_first = False
    return x


def logs_sometimes(model: Any, x: Tensor) -> Tensor:
    model.calls += 1
    if model.calls % 100 == 0 or model.calls > 5000:
        logging.getLogger(__name__).info("%d calls", model.calls)
    return x


def rotary_table(model: Any, x: Tensor) -> Tensor:
    if model.calls < len(x):
        model.calls = len(x)
        angles = torch.zeros(len(x), 4)
        angles[:, 0::2] = angles[:, 1::2] = torch.outer(torch.arange(len(x)), torch.ones(2))
        model.cos, model.sin = angles.cos(), angles.sin()
    return x * model.cos[: len(x)] + x.roll(1, -1) * model.sin[: len(x)]


def masks_by_shape(model: Any, x: Tensor) -> Tensor:
    if x.shape not in model.tables:
        model.tables[x.shape] = torch.ones(len(x), len(x)).tril()
    return model.tables[x.shape] @ x  # type: ignore[no-any-return]


def keeps_the_last(model: Any, x: Tensor) -> Tensor:
    model.last = x
    return model.last  # type: ignore[no-any-return]


def shares_a_module(model: Any, x: Tensor) -> Tensor:
    model.act = model.linear
    return model.act(x)  # type: ignore[no-any-return]


def exchanges_a_module(model: Any, x: Tensor) -> Tensor:
    """As BigBird does for batches that are too short for sparse attention: the weights stay."""
    if isinstance(model.act, nn.Tanh):
        model.act = nn.Sequential(model.linear)
    return model.act(x)  # type: ignore[no-any-return]


def registers_a_table(model: Any, x: Tensor) -> Tensor:
    if not hasattr(model, "table"):
        model.register_buffer("table", torch.arange(4.0), persistent=False)
    return x * model.table  # type: ignore[no-any-return]


def fills_a_buffer(model: Any, x: Tensor) -> Tensor:
    """As dynamic NTK rotary embeddings do for batches that are longer than the model's own."""
    if model.calls < len(x):
        model.calls = len(x)
        model.centre = 10.0 ** -(torch.arange(4.0) / model.calls)
    return x * model.centre


def puts_settings_back(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model.centre.copy_(x.mean(0))
    return x


@one_in(3)
@pytest.mark.parametrize(
    "use",
    [
        warns_once,
        logs_sometimes,
        rotary_table,
        masks_by_shape,
        keeps_the_last,
        shares_a_module,
        exchanges_a_module,
        registers_a_table,
        fills_a_buffer,
        puts_settings_back,
    ],
)
def test_what_is_made_once_or_changes_nothing_is_traced(use: Use) -> None:
    model = built(use)
    assert (model.is_first, model.calls, model.last, model.tables) == (True, 0, None, {})


def writes_a_log(model: Any, x: Tensor) -> Tensor:
    with Path(model.folder, "log.txt").open("a") as file:
        file.write("called")
    return x


def test_an_environment_variable_that_torch_sets_is_no_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch sets some once, such as its compiler's folder; a trace would not be kept for them."""
    monkeypatch.delenv("SET_BY_TORCH", raising=False)
    # Whose name is nowhere in the model's code, which asks for it then.
    of_torch = "import os; os.environ['_'.join(('SET', 'BY', 'TORCH'))] = 'yes'"

    def use(model: Any, x: Tensor) -> Tensor:
        exec(compile(of_torch, torch.__file__, "exec"))
        return x

    source = GraphSource(Leaves(use))
    build_graph(source, COLUMNS, training=True)
    assert not source.leaves  # nothing for the next call
    assert os.environ["SET_BY_TORCH"] == "yes"


def test_a_file_that_forward_only_writes_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    built(writes_a_log, str(tmp_path))
    assert "forward sets the file" in caplog.text
    assert '.open("a") as file:`' in caplog.text


def test_a_snapshot_is_compared_and_restored() -> None:
    model = Leaves(flag)
    before = Snapshot.take(model, copies=True)
    assert before.changes() == []
    model.held.mean = torch.zeros(2)
    model.objects.append(Held())
    model.tables["x"] = torch.zeros(2)
    Leaves.total = 3
    assert {str(left) for left in before.changes()} == {
        "model.held.mean",
        "model.objects",
        "model.tables['x']",
        "Leaves.total",
    }
    before.restore()
    assert before.changes() == []
    assert (model.held.mean, len(model.objects), model.tables, Leaves.total) == (None, 1, {}, 0)
