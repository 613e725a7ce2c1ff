"""Shares of the sequence between split products: gradients of one process, no all-reduce left."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from merak.core.mesh import Mesh, pretended
from merak.graph.ir.ir import Kind, ModelGraph
from merak.graph.tensor_parallel.apply import tensor_parallel
from merak.ops.collectives import copy_to, reduce_from
from merak.plan.cost.segments.measured import SegmentMemories
from tests.tiers import one_in
from tests.unit.graph import tensor_parallel_cases as cases
from tests.unit.graph.architectures import ARCHITECTURES
from tests.unit.graph.lockstep import assert_parity

BLOCKS = {"gpt2": 4, "gpt_neox": 2, "llama": 4, "bert": 4, "t5": 10, "bart": 10}


def split(model: nn.Module, columns: dict[str, torch.Tensor], degree: int) -> list[ModelGraph]:
    """The model on shares of the sequence, and without them."""
    graph = cases.traced(model, columns)
    weights = tensor_parallel(graph, None, degree).weights
    return [cases.shard_model(graph, weights, degree, sequence=s)[0] for s in (True, False)]


def all_reduces(graph: ModelGraph) -> int:
    """All-reduces of activations and of their gradients."""
    return sum(
        node.target in (copy_to, reduce_from)
        and not (source.op == "placeholder" and source.meta["kind"] is Kind.PARAMETER)
        for segment in graph.segments
        for node in segment.graph.nodes
        for source in node.all_input_nodes[:1]
    )


@one_in(3)
@pytest.mark.parametrize("name", BLOCKS)
def test_no_all_reduce_is_left_between_blocks(name: str) -> None:
    architecture = ARCHITECTURES[name]
    model, columns = architecture.build(), architecture.batch()
    shared, whole = split(model, columns, 2)
    assert all_reduces(whole) >= 2 * BLOCKS[name]
    assert all_reduces(shared) == 0
    calls = assert_parity(model, columns, None, 2, sequence=True)
    assert calls["reduce_scatter_to"] == BLOCKS[name]
    assert calls["gather_with_partial_grad"] >= BLOCKS[name]


@one_in(3)
@pytest.mark.parametrize("name", ["mixtral", "swin", "deberta_v2"])
def test_what_must_see_whole_sequences_gets_them(name: str) -> None:
    architecture = ARCHITECTURES[name]
    calls = assert_parity(architecture.build(), architecture.batch(), None, 2, sequence=True)
    assert calls["gather_from"] + calls.get("gather_with_partial_grad", 0) > 1


@pytest.mark.parametrize("family,attention", [("gpt2", "eager"), ("bert", "sdpa")])
def test_dropout_has_the_pattern_of_one_process(family: str, attention: str) -> None:
    model = cases.build(family, attention, dropout=0.2)
    assert_parity(model, cases.batch(), None, 4, sequence=True)


@one_in(3)
@pytest.mark.parametrize("samples,length,shares", [(1, 8, True), (2, 7, True), (1, 7, False)])
def test_lengths_that_do_not_divide(samples: int, length: int, shares: bool) -> None:
    # Where tokens do not divide, samples may; where neither do, all is whole.
    ids = torch.randint(cases.VOCABULARY, (samples, length))
    columns = {"input_ids": ids, "labels": ids}
    model = cases.build("gpt2", "sdpa", dropout=0.2)
    calls = assert_parity(model, columns, None, 2, sequence=True)
    assert calls.get("reduce_scatter_to", 0) == (4 if shares else 0)
    assert calls.get("reduce_from", 0) == (0 if shares else 4)


@pytest.mark.parametrize("degree", [2, 4])
def test_activations_between_the_products_fall_with_the_degree(degree: int) -> None:
    columns = cases.batch(padded=False)
    shared, whole = split(cases.build("gpt2", "sdpa", dropout=0.2), columns, degree)
    # Before a product its input and the statistics of the norm; after it the noise of dropout.
    between = 4 * cases.BATCH * cases.SEQUENCE * (32 + 2 + 32)
    memories = SegmentMemories(torch.device("cpu"))
    with pretended(Mesh(1, degree, 1, 0, torch.device("cpu"), None)):
        for own, other in zip(shared.segments[1:-1], whole.segments[1:-1], strict=True):
            (value,) = own.outputs
            assert shared.values[value].num_bytes * degree == whole.values[value].num_bytes
            saved, before = memories(own).saved_bytes, memories(other).saved_bytes
            assert before - saved >= between * (degree - 1) // degree
