"""Loops over the tokens of a sequence: one operator in the graph, with eager gradients."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from merak.core.errors import TraceError
from merak.core.storages import Storages
from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import ModelGraph
from merak.graph.ir.serialize import pack_model, unpack_model
from merak.graph.program.codegen import runnable
from merak.graph.segment.build import GraphSource, build_graph
from merak.graph.trace.branches.flags import optional_parameters
from merak.graph.trace.opaque import extrapolate, loops, record
from merak.graph.trace.opaque.dry_run import dry_run
from merak.graph.trace.opaque.functions import FunctionModule, function_of, is_function
from merak.graph.trace.opaque.operator import (
    CallCost,
    ModuleRef,
    OpaqueCall,
    connect_modules,
    is_opaque,
    opaque_calls,
)
from merak.graph.trace.opaque.probe import ProbeResult, probe
from merak.graph.trace.opaque.pytree import flatten
from merak.graph.trace.opaque.report import opaque_lines, report_opaque
from merak.plan.cost.segments.measured import SegmentMemories
from tests.unit.graph.stages import assert_like_eager

SIZE, MOST, LONG = 6, 9, 20


@pytest.fixture(autouse=True)
def few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops count as long much sooner, so that the tests take little time."""
    monkeypatch.setattr(loops, "MOST_PASSES", MOST)


def scan(x: torch.Tensor, decay: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """A recurrence over the tokens."""
    state = torch.zeros_like(x[:, 0])
    states = []
    for t in range(x.shape[1]):
        state = torch.tanh(decay * state + scale * x[:, t])
        states.append(state)
    return torch.stack(states, 1)


def scan_and_product(x: torch.Tensor, decay: torch.Tensor, scale: float) -> torch.Tensor:
    """The same, and a product, which an autocast computes in its type."""
    return scan(x, decay, scale) @ x


def scan_written(x: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """The same, in the place of what it is given."""
    for t in range(1, x.shape[1]):
        x[:, t] = torch.tanh(decay * x[:, t - 1].clone() + x[:, t].clone())
    return x * 1.0


class Mixer(nn.Module):
    """Projects, calls a function that loops, and projects."""

    scan: Callable[..., torch.Tensor] = staticmethod(scan)

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(SIZE, SIZE)
        self.decay = nn.Parameter(torch.linspace(0.1, 0.9, SIZE))
        self.out = nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.scan(self.into(x), self.decay))


class WritingMixer(Mixer):
    """Its function writes into what it is given."""

    scan = staticmethod(scan_written)


class MethodMixer(Mixer):
    """Loops in a method, which does not read its object, and keeps the last state."""

    def __init__(self) -> None:
        super().__init__()
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = self._scan(self.into(x), decay=self.decay)
        self.last = states[:, -1]
        return self.out(states)

    def _scan(self, x: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
        state, states = torch.zeros_like(x[:, 0]), torch.zeros_like(x)
        for t in range(x.shape[1]):
            state = decay * state + x[:, t]
            states[:, t] = state
        return states


class Recurrent(nn.Module):
    """Loops in its own forward, with a cell."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.RNNCell(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, states = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            states.append(state * 2.0)
        return torch.stack(states, 1)


class Model(nn.Module):
    """Blocks, a head and a loss."""

    def __init__(self, block: type[nn.Module], num_blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(num_blocks))
        self.head = nn.Linear(SIZE, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            x = x + block(x)
        return {"loss": nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


class TopLevel(nn.Module):
    """Loops in the forward of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.RNNCell(SIZE, SIZE)
        self.head = nn.Linear(SIZE, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        state = torch.zeros_like(x[:, 0])
        for t in range(x.shape[1]):
            state = self.cell(x[:, t] * 2.0, state)
        return {"loss": nn.functional.cross_entropy(self.head(state), labels[:, 0])}


class Experts(nn.Module):
    """As many pieces of a weight, and as many terms, as a long sequence has tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(LONG, SIZE, SIZE) / 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        terms = []
        for number in range(LONG):
            terms.append(torch.tanh(x @ self.weights[number]))
        total = terms[0]
        for term in terms:
            total = total + term
        return total


def columns(tokens: int) -> dict[str, TensorMeta]:
    return {
        "x": TensorMeta((2, tokens, SIZE), torch.float32),
        "labels": TensorMeta((2, tokens), torch.int64),
    }


def built(model: nn.Module, tokens: int) -> ModelGraph:
    return build_graph(GraphSource(model), columns(tokens), training=True)


def num_nodes(graph: ModelGraph) -> int:
    return sum(len(segment.graph.nodes) for segment in graph.segments)


def check(model: nn.Module, graph: ModelGraph, tokens: int) -> None:
    """Compare a step with eager code; every parameter has a gradient."""
    labels = torch.randint(0, 5, (2, tokens))
    assert_like_eager(graph, model, {"x": torch.randn(2, tokens, SIZE), "labels": labels})
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("block", [Mixer, MethodMixer])
def test_a_function_that_loops_is_one_operator_however_long_the_sequence(
    block: type[nn.Module],
) -> None:
    model = Model(block)
    graph = built(model, LONG)
    assert num_nodes(graph) == num_nodes(built(model, 2 * LONG))
    calls = opaque_calls(graph)
    assert len(calls) == 2
    assert all(is_function(call.ref.path) and not call.states for call in calls)
    # Its weights are no part of it: they are split and gathered as those of any other block.
    assert len(graph.segments) > 2
    check(model, graph, LONG)


def test_a_short_loop_is_written_out() -> None:
    model = Model(Mixer)
    graph = built(model, MOST)
    assert not opaque_calls(graph)
    assert num_nodes(graph) > 2 * MOST


def test_short_loops_of_many_layers_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "FEW_PASSES", 4)
    monkeypatch.setattr(loops, "MANY_OPERATORS", 60)
    assert not opaque_calls(built(Model(Mixer, 1), MOST))
    assert len(opaque_calls(built(Model(Mixer, 4), MOST))) == 4


def test_what_is_opaque_hangs_on_the_shape_alone() -> None:
    source = GraphSource(Model(Mixer))
    assert opaque_calls(build_graph(source, columns(LONG), training=True))
    assert not opaque_calls(build_graph(source, columns(MOST), training=True))


def test_layers_pieces_of_a_weight_and_terms_of_a_sum_are_no_such_loop() -> None:
    assert not opaque_calls(built(Model(lambda: nn.Linear(SIZE, SIZE), LONG), 8))  # type: ignore[arg-type]
    assert not opaque_calls(built(Model(Experts, 1), 8))


@pytest.mark.parametrize("block", [Recurrent, WritingMixer])
def test_a_module_is_opaque_where_no_function_can_be(block: type[nn.Module]) -> None:
    model = Model(block)
    graph = built(model, LONG)
    assert {call.class_name for call in opaque_calls(graph)} == {block.__name__}
    assert num_nodes(graph) == num_nodes(built(model, 2 * LONG))
    check(model, graph, LONG)


def test_layers_that_are_alike_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def noted(call: OpaqueCall, *others: object) -> object:
        tried.append(call.ref.path)
        return dry_run(call, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(record, "dry_run", noted)
    assert len(opaque_calls(built(Model(Recurrent, 5), LONG))) == 5
    # Whose input gets a gradient is not alike.
    assert tried == ["blocks.0", "blocks.1"]


def test_its_parameters_get_a_gradient_in_every_step() -> None:
    for block in (Mixer, Recurrent):
        graph = built(Model(block), LONG)
        assert not any(optional_parameters(segment) for segment in graph.segments)


def test_a_loop_of_the_model_itself_is_written_out_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = TopLevel()
    with caplog.at_level(logging.WARNING):
        graph = built(model, LONG)
    assert not opaque_calls(graph)
    (warning,) = caplog.messages
    assert "unrolls the loop around" in warning
    assert __file__ in warning
    check(model, graph, LONG)


def test_a_longer_one_is_refused_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "MOST_OPERATORS", 40)
    with pytest.raises(TraceError, match="put the loop into the forward of a module of its own"):
        built(TopLevel(), 2 * LONG)


def test_a_module_of_most_of_the_model_is_opaque_only_where_the_loop_is_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Model(Recurrent, 1)
    assert not opaque_calls(built(model, LONG))
    monkeypatch.setattr(loops, "MOST_OPERATORS", 40)
    graph = built(model, 2 * LONG)
    assert len(opaque_calls(graph)) == 1
    check(model, graph, 2 * LONG)


def test_the_memory_that_it_keeps_is_forecast() -> None:
    model = Model(Mixer, 1)
    graph = built(model, LONG)
    segment = next(s for s in graph.segments if any(map(is_opaque, s.graph.nodes)))
    memory = SegmentMemories(torch.device("cpu"))(segment)
    values = dict(model.named_parameters()) | {"x": torch.randn(2, LONG, SIZE)}
    given = [values[n.meta["name"]] for n in segment.graph.find_nodes(op="placeholder")]
    with Storages(given) as storages:
        outputs = runnable(segment.graph)(*given)
    assert storages.live_bytes == memory.saved_bytes + memory.own_bytes
    assert len(outputs) == len(segment.outputs)


def test_a_graph_from_disk_finds_the_function() -> None:
    model = Model(Mixer)
    graph = unpack_model(pack_model(built(model, LONG)))
    connect_modules(graph, model)
    check(model, graph, LONG)


def test_the_function_has_its_own_code_again() -> None:
    code = scan.__code__
    built(Model(Mixer), LONG)
    assert scan.__code__ is code
    assert function_of(f"{__name__}:scan") is sys.modules[__name__].scan  # type: ignore[attr-defined]


def test_what_is_opaque_is_told_with_its_line() -> None:
    (line,) = opaque_lines(report_opaque(built(Model(Mixer), LONG)))
    assert f"{__name__}:scan" in line
    assert "a loop of many passes" in line


def call_of(name: str, autocast: tuple[str, torch.dtype] | None = None) -> OpaqueCall:
    name = f"{__name__}:{name}"
    _, arguments = flatten(((torch.empty(0), torch.empty(1)), {"scale": 2.0}))
    return OpaqueCall(
        ref=ModuleRef(name, FunctionModule(name)),
        class_name="",
        why="",
        states=(),
        parameters=0,
        arguments=arguments,
        scalars=frozenset(),
        cost=CallCost(()),
        modes=(True,),
        autocast=autocast,
        grad=True,
        device=autocast[0] if autocast else "cpu",
    )


def scan_metas(size: int) -> list[TensorMeta]:
    return [
        TensorMeta((2, size, size), torch.float32, requires_grad=True),
        TensorMeta((size,), torch.float32, requires_grad=True),
    ]


def test_a_long_loop_is_known_from_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    call, metas = call_of("scan"), scan_metas(170)
    found = dry_run(call, metas, torch.device("cpu"))
    monkeypatch.setattr(extrapolate, "LENGTHS", (1000, 2000))
    assert found == dry_run(call, metas, torch.device("cpu"))
    assert found.cost.outputs == (TensorMeta((2, 170, 170), torch.float32),)


@pytest.mark.parametrize("how", [dry_run, partial(probe, real={})])
def test_what_runs_on_a_gpu_that_is_not_here_is_tried_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, how: Callable[..., ProbeResult]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    metas = scan_metas(5)
    found, known = (
        how(
            call_of("scan_and_product", (device, torch.bfloat16)),
            metas,
            device=torch.device(device),
        )
        for device in ("cuda", "cpu")
    )
    assert found == known
    assert found.cost.outputs == (TensorMeta((2, 5, 5), torch.bfloat16),)
