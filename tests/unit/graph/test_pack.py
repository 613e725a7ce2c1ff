"""Graphs as plain data and back."""

from __future__ import annotations

import operator
import pickle

import pytest
import torch
from torch import fx, nn

from merak.graph.pack import pack, pack_model, unpack, unpack_model
from tests.unit.graph import families, odd_models
from tests.unit.graph.stages import Pipeline, built


def text(graph: fx.Graph) -> str:
    return "\n".join(f"{n.format_node()} {n.meta}" for n in graph.nodes)


def test_arguments_of_every_kind() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["tensor"] = 3
    many = graph.call_function(torch.ops.aten.split.Tensor, (x, 2), {"dim": -1})
    one = graph.call_function(operator.getitem, (many, slice(0, 1, None)))
    made = graph.call_function(
        torch.ops.aten.full.default,
        ([2, 3], float("inf")),
        {"dtype": torch.bfloat16, "device": torch.device("cpu"), "pin_memory": None},
    )
    listed = graph.call_function(torch.ops.aten.index.Tensor, (made, [None, x, one]))
    graph.output((listed, x))
    again = unpack(pickle.loads(pickle.dumps(pack(graph))))
    again.lint()
    assert text(again) == text(graph)


@pytest.mark.parametrize(
    "kind", [odd_models.ResNet, odd_models.PlainTensors, odd_models.OwnBackward]
)
def test_models_come_back_whole(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind()
    batch = odd_models.BATCHES.get(kind, odd_models.rows)()
    graph = built(model, batch)
    again = unpack_model(pickle.loads(pickle.dumps(pack_model(graph))))
    for one, other in zip(
        (graph.prologue, *graph.segments), (again.prologue, *again.segments), strict=True
    ):
        assert text(one.graph) == text(other.graph)
        assert (one.index, one.name, one.parameters) == (other.index, other.name, other.parameters)
    assert (again.values, again.parameters, again.tied) == (
        graph.values,
        graph.parameters,
        graph.tied,
    )
    assert again.boundaries() == graph.boundaries()
    assert torch.equal(Pipeline(again, model).train(batch), Pipeline(graph, model).train(batch))


def test_packing_leaves_the_graph_alone() -> None:
    graph = built(families.gpt2(1), families.batch_for("gpt2"))
    before = [text(segment.graph) for segment in graph.segments]
    unpack_model(pack_model(graph))
    assert [text(segment.graph) for segment in graph.segments] == before
