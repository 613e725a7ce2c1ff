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

from merak.graph.program.codegen import runnable
from merak.graph.program.compiled import Compilation, compile_backends, compile_modes

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


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_graph_computes_the_same(backend: str) -> None:
    # In a process of its own: torch.compile changes how all code runs behind it.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        pool.submit(compare, backend).result()


def compare(backend: str) -> None:
    seen.clear()
    compiled = runnable(graph(), compilation=Compilation(backend))
    for found, expected in zip(run(compiled), run(runnable(graph())), strict=True):
        torch.testing.assert_close(found, expected)
    assert len(seen) == 6  # in every call of both


def test_plain_operators_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[fx.GraphModule] = []

    def compile_nothing(module: fx.GraphModule, **how: Any) -> fx.GraphModule:
        given.append(module)
        return module

    monkeypatch.setattr(torch, "compile", compile_nothing)
    runnable(graph(), compilation=Compilation("aot_eager"))
    targets = [{n.target for n in m.graph.nodes if n.op == "call_function"} for m in given]
    assert [aten.mm.default in t for t in targets] == [True, False, False]
    assert not any({own, aten.add_.Tensor} & found for found in targets)
    assert aten.native_dropout.default in targets[-1]


def test_cuda_graphs_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []

    def compile_nothing(module: fx.GraphModule, **how: Any) -> fx.GraphModule:
        given.append(how)
        return module

    monkeypatch.setattr(torch, "compile", compile_nothing)
    for mode in (None, "reduce-overhead", "max-autotune"):
        runnable(graph(), compilation=Compilation(mode=mode))
    assert all(how["options"]["triton.cudagraphs"] is False for how in given)
    assert all(how["options"]["fallback_random"] is True for how in given)
    assert given[-1]["options"]["max_autotune"] is True


def test_torch_names_its_backends_and_modes() -> None:
    assert {"inductor", "aot_eager"} <= set(compile_backends())
    assert {"default", "reduce-overhead"} <= set(compile_modes())
