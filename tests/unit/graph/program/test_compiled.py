"""Compiled functions of graphs, whose own operators run between compiled runs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from torch import fx

import merak
from merak.core.mesh import current_mesh, reset
from merak.data import signature
from merak.engine.build import build_engine
from merak.graph.ir.torch_compiler import (
    Compilation,
    TorchCompiler,
    compile_backends,
    compile_modes,
)
from merak.graph.program.codegen import runnable
from merak.graph.segment.build import GraphSource
from merak.plan.engine_options import EngineOptions
from tests.unit.engine.models import gpt2, text_batch

aten = torch.ops.aten

seen: list[torch.Size] = []


def own(tensor: torch.Tensor) -> torch.Tensor:
    """An operator of Merak's own, as a collective is: Python that must run in every call."""
    assert not torch.compiler.is_compiling()
    seen.append(tensor.shape)
    return tensor * 2


def graph() -> fx.Graph:
    made = fx.Graph()
    x, weight, count = (made.placeholder(name) for name in ("x", "weight", "count"))
    call: Callable[..., fx.Node] = made.call_function
    hidden = call(aten.tanh.default, (call(aten.mm.default, (x, weight)),))
    call(aten.add_.Tensor, (count, 1))
    between = call(own, (call(aten.sin.default, (hidden,)),))
    dropped = call(aten.native_dropout.default, (between, 0.5, True))
    first = call(operator.getitem, (dropped, 0))
    made.output((call(aten.mul.Tensor, (first, count)), call(aten.sum.default, (first,))))
    return made


def run(function: Callable[..., Any]) -> Iterator[torch.Tensor]:
    x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
    weight = torch.linspace(0, 1, 20).view(4, 5).requires_grad_()
    count = torch.ones(1)
    for _ in range(2):
        torch.manual_seed(3)
        outputs = function(x, weight, count)
        (outputs[0].sum() + outputs[1]).backward()
        yield from (*outputs, x.grad, weight.grad, count)  # type: ignore[misc]
    torch.manual_seed(4)
    with torch.no_grad():
        outputs = function(x, weight, count)
    yield from outputs


@pytest.fixture(scope="module")
def apart() -> Iterator[ProcessPoolExecutor]:
    """A process of its own: torch.compile changes how all code runs behind it."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield pool


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_graph_computes_the_same(backend: str, apart: ProcessPoolExecutor) -> None:
    apart.submit(compare, backend).result()


def compare(backend: str) -> None:
    seen.clear()
    compiled = runnable(graph(), compiler=TorchCompiler(Compilation(backend)))
    for found, expected in zip(run(compiled), run(runnable(graph())), strict=True):
        torch.testing.assert_close(found, expected)
    assert len(seen) == 6  # in every call of both


def test_plain_operators_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[fx.GraphModule] = []

    def compile_nothing(module: fx.GraphModule, **how: Any) -> fx.GraphModule:
        given.append(module)
        return module

    monkeypatch.setattr(torch, "compile", compile_nothing)
    runnable(graph(), compiler=TorchCompiler(Compilation("aot_eager")))
    targets = [{n.target for n in m.graph.nodes if n.op == "call_function"} for m in given]
    assert [aten.mm.default in t for t in targets] == [True, False, False]
    assert not any({own, aten.add_.Tensor, aten.native_dropout.default} & t for t in targets)
    assert aten.mul.Tensor in targets[-1]


def test_cuda_graphs_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []

    def compile_nothing(module: fx.GraphModule, **how: Any) -> fx.GraphModule:
        given.append(how)
        return module

    monkeypatch.setattr(torch, "compile", compile_nothing)
    for mode in (None, "reduce-overhead", "max-autotune"):
        runnable(graph(), compiler=TorchCompiler(Compilation(mode=mode)))
    assert all(how["options"]["triton.cudagraphs"] is False for how in given)
    assert all(how["options"]["fallback_random"] is True for how in given)
    assert given[-1]["options"]["max_autotune"] is True


def test_torch_names_its_backends_and_modes() -> None:
    assert {"inductor", "aot_eager"} <= set(compile_backends())
    assert {"default", "reduce-overhead"} <= set(compile_modes())


def test_equal_layers_are_compiled_once(apart: ProcessPoolExecutor) -> None:
    few, many = (apart.submit(count_compilations, layers).result() for layers in (2, 3))
    assert few == many > 0


def count_compilations(layers: int) -> int:
    """Compilations of a model's steps, whose gradients are those of what is not compiled."""
    graphs: list[fx.GraphModule] = []

    def counting(graph: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.register_backend(counting, name=f"counting_{layers}")
    compilation = Compilation(f"counting_{layers}")
    merak.init(device="cpu")
    found = []
    for how in (None, compilation):
        options = EngineOptions(num_microbatches=2, recompute="off", compilation=how)
        source = GraphSource(gpt2(layers=layers))
        batch = text_batch()
        columns = signature(batch).columns
        engine = build_engine(source, columns, current_mesh(), options)
        engine.train_step(0, [columns] * 2, [batch, text_batch(seed=1)], 0.5)
        found.append([parameter.grad for parameter in engine.parameters.values()])
    assert all(map(torch.equal, *found))
    reset()
    return len(graphs)
