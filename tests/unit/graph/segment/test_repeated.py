"""Graphs of deep models at other microbatches, of which the repeated blocks are traced once."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import Kind, ModelGraph
from merak.graph.ir.structure import structural_key
from merak.graph.segment.build import GraphSource, build_graph
from merak.graph.segment.repeated import RepeatedGraphs
from tests.unit.graph.architectures import ARCHITECTURES

DEPTH = {
    "gpt2": "n_layer",
    "bloom": "n_layer",
    "t5": "num_layers",
    "bart": "encoder_layers decoder_layers",
}
FAST = ("llama",)
SLOW = (
    "mixtral",
    "gpt_neox",
    "bloom",
    "opt",
    "falcon",
    "qwen3",
    "phi3",
    "bert",
    "t5",
    "bart",
    "vit",
    "gemma3",
)

WHOLE = ("t5",)
"""Models of which no shorter one has all segments: they are traced whole."""


def columns(batch: dict[str, torch.Tensor], microbatch: int) -> dict[str, TensorMeta]:
    return {n: TensorMeta((microbatch, *v.shape[1:]), v.dtype) for n, v in batch.items()}


def assert_same(found: ModelGraph, traced: ModelGraph) -> None:
    assert len(found.segments) == len(traced.segments)
    for ours, theirs in zip(found.segments, traced.segments, strict=True):
        assert structural_key(ours.graph) == structural_key(theirs.graph)
        assert (ours.name, ours.parameters, ours.columns) == (
            theirs.name,
            theirs.parameters,
            theirs.columns,
        )
        for kind in ("inputs", "outputs", "batch_only"):
            pairs = zip(getattr(ours, kind), getattr(theirs, kind), strict=True)
            assert all(found.values.get(a) == traced.values.get(b) for a, b in pairs)
        for node in ours.graph.find_nodes(op="placeholder"):
            if node.meta["kind"] in (Kind.VALUE, Kind.BATCH_ONLY):
                assert found.values[node.meta["name"]] == node.meta["tensor"]
    assert (found.columns, found.parameters) == (traced.columns, traced.parameters)
    sizes = [
        sorted(str(graph.values[name]) for name in graph.prologue.outputs)
        for graph in (found, traced)
    ]
    assert sizes[0] == sizes[1]
    assert found.prologue.columns == traced.prologue.columns
    found.prologue.graph.lint()


@pytest.mark.parametrize(
    "name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_it_is_what_a_trace_finds(name: str) -> None:
    architecture = ARCHITECTURES[name]
    fields = DEPTH.get(name, "num_hidden_layers").split()
    changes = dict.fromkeys(fields, 6)
    if name == "gemma3":
        kinds = ["sliding_attention", "full_attention"] * 6
        changes = {"num_hidden_layers": 12, "layer_types": kinds}
    model, batch = architecture.build(**changes), architecture.batch()
    graphs = RepeatedGraphs(GraphSource(model), lambda b: columns(batch, b))
    for microbatch in (1, 3):
        found = graphs(microbatch)
        traced = build_graph(GraphSource(model), columns(batch, microbatch), training=True)
        assert_same(found, traced)
    assert graphs.repeats == (name not in WHOLE)


class Growing(nn.Module):
    """Blocks that are all different."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [4 + i for i in range(7)]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.mean()


class ByIndex(nn.Module):
    """Equal blocks, of which the fifth is called differently."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) if index == 5 else torch.relu(layer(x))
        return x.mean()


@pytest.mark.parametrize("model_class", [Growing, ByIndex])
def test_blocks_that_differ_are_told_apart(model_class: type[nn.Module]) -> None:
    model = model_class()
    batch = {"x": torch.zeros(2, 4)}
    graphs = RepeatedGraphs(GraphSource(model), lambda b: columns(batch, b))
    for microbatch in (1, 2, 3):
        own = columns(batch, microbatch)
        assert_same(graphs(microbatch), build_graph(GraphSource(model), own, training=True))
    assert not graphs.repeats
