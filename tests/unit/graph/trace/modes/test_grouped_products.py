"""Grouped products in a trace: those of float32 are operators, as those of bfloat16 are."""

from __future__ import annotations

import pytest
import torch

from merak.graph.ir.operators import GROUPED_GEMMS, family
from tests.unit.graph import tensor_parallel_cases as cases
from tests.unit.graph.expert_models import build
from tests.unit.graph.stages import Pipeline, built, gradients_of


def test_as_eager() -> None:
    model, batch = build("grouped"), cases.batch(padded=False)
    graph = built(model, batch)
    products = [
        n for s in graph.segments for n in s.graph.nodes if family(n.target) in GROUPED_GEMMS
    ]
    assert len(products) == 2
    loss = Pipeline(graph, model).train(batch)
    found = gradients_of(model)
    model.zero_grad()
    expected = model(**batch)["loss"]
    expected.backward()
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-6)
    for name, gradient in gradients_of(model).items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7)
