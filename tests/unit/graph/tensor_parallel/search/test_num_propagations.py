"""How often a search follows placements through a segment, which is nearly all of its time."""

from __future__ import annotations

import pytest
import transformers as hf
from torch import fx

from merak.graph.tensor_parallel import propagate
from merak.graph.tensor_parallel.apply import auto_tensor_parallel
from tests.unit.graph import tensor_parallel_cases as cases

MOST = 250
"""Of one segment. Those of Mamba, longer than most, have about 215."""


@pytest.fixture(autouse=True)
def shared_findings() -> None:
    """None: what is found is counted."""


def propagations(num_layers: int, patch: pytest.MonkeyPatch) -> list[int]:
    """Propagations of each segment that is searched, of a model whose segments are long."""
    config = hf.MambaConfig(
        hidden_size=32, state_size=8, num_hidden_layers=num_layers, vocab_size=cases.VOCABULARY
    )
    graph = cases.traced(hf.MambaForCausalLM(config), cases.batch(padded=False))
    counted: dict[int, int] = {}
    once = propagate.propagate_once

    def counting(graph: fx.Graph, *rest: object) -> propagate.Propagation:
        counted[id(graph)] = counted.get(id(graph), 0) + 1
        return once(graph, *rest)  # type: ignore[arg-type]

    with patch.context() as own:
        own.setattr(propagate, "propagate_once", counting)
        auto_tensor_parallel(graph, 2)
    return sorted(counted.values())


def test_equal_blocks_are_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (propagations(n, monkeypatch) for n in (2, 3))
    assert few == many
    assert max(few) <= MOST
