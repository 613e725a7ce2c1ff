"""Functions that torch compiles train as those that it does not, under every schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import merak
from merak.core.mesh import current_mesh
from merak.data import signature
from merak.engine.build import build_engine
from merak.graph.ir.torch_compiler import Compilation
from merak.graph.segment.build import GraphSource
from merak.plan.engine_options import EngineOptions
from tests.multirank.memory_jobs import MODELS
from tests.multirank.ranks import RankPool
from tests.multirank.training import Layout
from tests.tiers import slow
from tests.unit.engine.models import text_batch


def gradients(layout: Layout, name: str, settings: list[dict[str, Any]]) -> list[list[Any]]:
    """Per setting: the gradients, and how many functions torch was given, without and with it."""
    dp, tp, pp = layout
    merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    given: list[Any] = []

    def counting(graph: Any, inputs: Any) -> Any:
        given.append(graph)
        return graph

    backend = f"counting_{id(given)}"
    torch._dynamo.register_backend(counting, name=backend)
    results = []
    for options in settings:
        found = []
        for how in (None, Compilation(backend)):
            chosen = EngineOptions(num_microbatches=4, compilation=how, **options)
            torch.manual_seed(0)
            source, batch = GraphSource(MODELS[name](0.0)), text_batch()
            columns = signature(batch).columns
            engine = build_engine(source, columns, current_mesh(), chosen)
            batches = [text_batch(seed=seed) for seed in range(4)]
            engine.train_step(0, [columns] * 4, batches, 0.25)
            found.append((engine.optimizer_params.gradients(), len(given)))
            given.clear()
        results.append(found)
    return results


@pytest.mark.parametrize(
    ("layout", "name", "settings"),
    [
        (
            (1, 1, 2),
            "gpt2",
            [
                {"schedule": "zero_bubble_v"},
                {"recompute": "selective"},
                {"offload_activations": True},
            ],
        ),
        slow((2, 1, 1), "llama", [{"zero": 3}, {"zero": 3, "recompute": "full"}]),
        slow(
            (1, 2, 1),
            "llama",
            [{"sequence_parallel": True, "sub_pipelining": "off"}, {"sub_pipelining": "on"}],
        ),
    ],
)
def test_compiled_functions_give_the_same_gradients(
    pool: RankPool, layout: Layout, name: str, settings: list[dict[str, Any]]
) -> None:
    for rank in pool.run(gradients, 2, layout, name, settings):
        for (expected, none), (found, some) in rank:
            assert none == 0 < some
            assert found.keys() == expected.keys() != set()
            for parameter, gradient in expected.items():
                torch.testing.assert_close(found[parameter], gradient)
