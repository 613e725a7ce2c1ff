"""Opaque loops on shards: the same gradients as of one process, or the loop stays whole."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from merak.core.errors import ShardError
from merak.graph.ir.ir import ModelGraph
from merak.graph.tensor_parallel.apply import (
    attributes_for,
    auto_tensor_parallel,
    given_weights,
)
from merak.graph.tensor_parallel.features import Column
from merak.graph.trace.opaque import loops
from merak.graph.trace.opaque.dry_run import dry_run
from merak.graph.trace.opaque.operator import cost_of, is_opaque, opaque_calls, operands
from tests.tiers import one_in
from tests.unit.graph import loop_models as models
from tests.unit.graph import tensor_parallel_cases as cases
from tests.unit.graph.lockstep import assert_parity

TOKENS = 20
SHARDED = (models.Selective, models.DeltaRule)
WHOLE = {
    models.Mixing: "of other ranks",
    models.Scaled: "is another operator on shards",
    models.Counted: "is another operator on shards",
    models.OwnBackward: "calls _Flipped, which has a backward of its own",
    models.Branching: "does something else in a longer loop",
}


@pytest.fixture(autouse=True)
def few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops count as long much sooner, so that the tests take little time."""
    monkeypatch.setattr(loops, "MOST_PASSES", 9)


@pytest.fixture(autouse=True)
def shared_findings() -> None:
    """None: how many tokens are looked at is changed."""


def look_at_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at fewer tokens than there are, as of long loops."""
    monkeypatch.setattr("merak.graph.tensor_parallel.rules.loops.FEW_KERNELS", 0)
    monkeypatch.setattr("merak.graph.tensor_parallel.rules.loops.SHORT_LENGTHS", ((4, 8),))


def built(block: type[nn.Module]) -> tuple[nn.Module, ModelGraph]:
    torch.manual_seed(0)
    model = models.Blocks(block, num_blocks=1).train()
    graph = cases.traced(model, models.batch_of(TOKENS, 0, 2))
    assert len(opaque_calls(graph)) == 1
    return model, graph


def opaque_nodes_of_a_rank(graph: ModelGraph, degree: int) -> list[fx.Node]:
    parallel = auto_tensor_parallel(graph, degree)
    segments = [parallel(segment)[0] for segment in graph.segments]
    return [node for segment in segments for node in segment.graph.nodes if is_opaque(node)]


@one_in(3)
@pytest.mark.parametrize(
    ("block", "degree", "is_short"),
    [
        (models.Selective, 2, True),
        (models.Selective, 4, False),
        (models.DeltaRule, 2, False),
        (models.DeltaRule, 4, True),
        (models.OwnLoop, 2, False),
    ],
)
def test_ranks_give_what_one_gives(
    block: type[nn.Module], degree: int, is_short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_short:
        look_at_short_ones(monkeypatch)
    model, graph = built(block)
    weights = auto_tensor_parallel(graph, degree).weights
    names = {name for name, _ in model.named_parameters() if "mixer" in name}
    whole = {name.partition("mixer.")[2] for name in names - weights.keys()}
    assert whole <= {"maps.weight", "maps.bias", "out.bias"}
    assert_parity(model, models.batch_of(TOKENS, 0, 2), None, degree)


def test_groups_of_ranks_run_a_loop_together() -> None:
    """4 heads of keys and 8 of values on 6 ranks: two groups have half of both."""
    torch.manual_seed(0)
    model = models.Blocks(models.DeltaRule, num_blocks=1).train()
    batch = models.batch_of(TOKENS, 0, 64)
    (node,) = opaque_nodes_of_a_rank(cases.traced(model, batch), 6)
    heads = [operand.meta["tensor"].shape[2] for operand in operands(node)]
    assert heads == [2, 2, 4, 4]
    assert_parity(model, batch, None, 6)


@pytest.mark.parametrize("block", SHARDED)
def test_its_cost_is_that_of_the_shards(block: type[nn.Module]) -> None:
    _, graph = built(block)
    (whole,) = opaque_calls(graph)
    (node,) = opaque_nodes_of_a_rank(graph, 2)
    call = node.meta["opaque"]
    metas = [operand.meta["tensor"] for operand in operands(node)]
    found = dry_run(call, metas, torch.device("cpu"))
    assert cost_of(node) == call.cost == found.cost
    assert [m.shape for m in node.meta["tensor"]] == [m.shape for m in call.cost.outputs]
    assert call.cost.saved_bytes < 0.6 * whole.cost.saved_bytes


@one_in(3)
@pytest.mark.parametrize(("block", "why"), WHOLE.items())
def test_a_loop_that_needs_the_whole_has_it(
    block: type[nn.Module], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if block is models.Branching:
        look_at_short_ones(monkeypatch)
    model, graph = built(block)
    with pytest.raises(ShardError, match=f"Python code, which must see the whole: it .*{why}"):
        given_weights(graph, attributes_for(graph, {"mixer.into": Column()}), 2)
    (whole,) = opaque_calls(graph)
    found = [node.meta["opaque"].cost.outputs for node in opaque_nodes_of_a_rank(graph, 2)]
    assert found == [whole.cost.outputs]
    assert_parity(model, models.batch_of(TOKENS, 0, 2), None, 2)


def test_channels_as_many_as_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both become fewer in a shorter loop."""
    look_at_short_ones(monkeypatch)
    monkeypatch.setattr(models, "WIDTH", TOKENS)
    model, graph = built(models.Selective)
    assert "blocks.0.mixer.out.weight" in auto_tensor_parallel(graph, 2).weights
    assert_parity(model, models.batch_of(TOKENS, 0, 2), None, 2)
