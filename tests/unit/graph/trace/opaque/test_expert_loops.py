"""Loops over experts at the top of a model: several operators of the graph, as eager code."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from merak.core.errors import TraceError
from merak.graph.ir.ir import ModelGraph
from merak.graph.ir.serialize import pack_model, unpack_model
from merak.graph.program.codegen import runnable
from merak.graph.trace.opaque.operator import is_dynamic_region, opaque_nodes
from tests.tiers import one_in, slow
from tests.unit.graph import tensor_parallel_cases as cases
from tests.unit.graph.expert_loops import (
    EXPERTS,
    LENGTH,
    SAMPLES,
    WAYS,
    WIDTH,
    Experts,
    into_a_buffer,
    seen_by_an_older_view,
)


def batch(seed: int) -> dict[str, Tensor]:
    """Of the last one, all tokens are alike: there are experts that nobody asks."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, LENGTH, WIDTH, generator=generator)
    return {"x": x if seed < 2 else x[:1, :1].expand_as(x).contiguous()}


def gradients(graph: ModelGraph, model: Experts, given: dict[str, Tensor]) -> dict[str, Tensor]:
    named = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    others = {**cases.buffers(model, graph), **given}
    loss = cases.run_model(graph, named, others, lambda part, inputs: runnable(part)(*inputs))
    loss.backward()
    return {"loss": loss.detach()} | {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named.items()
    }


@one_in(4)
@pytest.mark.parametrize(
    ("way", "layers"),
    [
        *((way, 2 if way == "added" else 1) for way in WAYS),
        *(slow(way, 1 if way == "added" else 2) for way in WAYS),
    ],
)
def test_gradients_are_those_of_eager_code(way: str, layers: int) -> None:
    torch.manual_seed(0)
    model = Experts(WAYS[way], layers).train()
    graph = unpack_model(pack_model(cases.traced(model, batch(0))))
    assert not opaque_nodes(graph)
    nodes = [n for s in graph.segments for n in s.graph.nodes if is_dynamic_region(n)]
    assert len(nodes) == layers * (1 if way == "collected" else EXPERTS)
    for seed in range(3):
        found = gradients(graph, model, batch(seed))
        model.zero_grad()
        loss = model(**batch(seed))
        loss.backward()
        assert torch.allclose(found.pop("loss"), loss, rtol=1e-6)
        for name, parameter in model.named_parameters():
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            assert torch.allclose(found[name], expected, rtol=1e-5, atol=1e-7), name


@pytest.mark.parametrize("way", [seen_by_an_older_view, into_a_buffer])
def test_writes_that_others_see_are_refused(way: object) -> None:
    with pytest.raises(TraceError, match="the shape of a tensor depends there on the values of"):
        cases.traced(Experts(way).train(), batch(0))  # type: ignore[arg-type]
