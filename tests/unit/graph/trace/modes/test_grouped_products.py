"""Grouped products in a trace: those of float32 are operators, as those of bfloat16 are."""

from __future__ import annotations

from merak.graph.ir.operators import GROUPED_GEMMS, family
from tests.unit.graph import tensor_parallel_cases as cases
from tests.unit.graph.expert_models import build
from tests.unit.graph.stages import assert_like_eager, built


def test_as_eager() -> None:
    model, batch = build("grouped"), cases.batch(padded=False)
    graph = built(model, batch)
    products = [
        n for s in graph.segments for n in s.graph.nodes if family(n.target) in GROUPED_GEMMS
    ]
    assert len(products) == 2
    assert_like_eager(graph, model, batch, {"rtol": 1e-6, "atol": 0.0}, rtol=1e-5, atol=1e-7)
