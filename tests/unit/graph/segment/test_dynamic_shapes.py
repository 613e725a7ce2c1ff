"""Graphs at shapes that change: from one trace they are what each shape's own trace gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import nn

from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import ModelGraph
from merak.graph.ir.structure import structural_key
from merak.graph.segment.build import GraphSource, build_graph
from merak.graph.segment.dynamic_shapes import GraphsByShape
from tests.tiers import slow
from tests.unit.graph.families import gpt2, llama, mixtral, t5

Columns = dict[str, TensorMeta]


def texts(length: int, batch: int = 2, labels: int | None = None) -> Columns:
    other = length if labels is None else labels
    return {
        "input_ids": TensorMeta((batch, length), torch.int64),
        "labels": TensorMeta((batch, other), torch.int64),
    }


def written(graph: ModelGraph) -> list[object]:
    """Everything of a graph but the names of values."""
    parts = (graph.prologue, *graph.segments)
    names = [(part.parameters, part.buffers, part.columns) for part in parts]
    return [names, list(graph.outputs), *(structural_key(part.graph) for part in parts)]


class Own(GraphsByShape):
    """Counts the shapes that are traced as they are."""

    @property
    def num_traced(self) -> int:
        return self._num_traced


@pytest.mark.parametrize(
    ("make", "training"), [(gpt2, False), (mixtral, True), slow(gpt2, True), slow(mixtral, False)]
)
def test_resized_graphs_are_those_of_own_traces(
    make: Callable[[int], nn.Module], training: bool
) -> None:
    source = GraphSource(make(1))
    graphs = Own(source, training=training)
    graphs(texts(9)), graphs(texts(7))  # these are traced
    for columns in (texts(11, batch=3), texts(6, batch=4)):
        own = build_graph(source, columns, training=training)
        assert written(graphs(columns)) == written(own)
    assert graphs.num_traced == 2


def test_two_lengths() -> None:
    source = GraphSource(t5(1, dropout_rate=0.1))
    graphs = Own(source, training=True)
    graphs(texts(9, labels=9)), graphs(texts(7, labels=5))  # these are traced
    resized = graphs(columns := texts(12, labels=4))
    assert written(resized) == written(build_graph(source, columns, training=True))
    assert graphs.num_traced == 2


class Branching(nn.Module):
    """Runs other operators on long batches than on short ones, and one layer more on long rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, input_ids: torch.Tensor) -> Mapping[str, torch.Tensor]:
        x = self.embed(input_ids)
        x = x.tanh() if input_ids.shape[1] > 8 else x.sigmoid()
        if input_ids.shape[0] * 2 == input_ids.shape[1]:
            x = self.head(x)[..., :8]
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), input_ids.flatten())
        return {"loss": loss}


class ByNumber(Branching):
    """Makes a plain number of a size, which a trace cannot do without."""

    def forward(self, input_ids: torch.Tensor) -> Mapping[str, torch.Tensor]:
        factor = torch.tensor([float(input_ids.shape[1])])
        return {"loss": (self.head(self.embed(input_ids)) * factor).mean()}


@pytest.mark.parametrize("model", [Branching, ByNumber])
def test_what_a_trace_took_for_granted_of_sizes_holds(model: type[nn.Module]) -> None:
    source = GraphSource(model())
    graphs = Own(source, training=True)
    batches = [(2, 5), (2, 7), (2, 4), (3, 6), (3, 12), (4, 5), (1, 6)]
    for batch, length in batches:
        columns = {"input_ids": TensorMeta((batch, length), torch.int64)}
        own = build_graph(source, columns, training=True)
        found = graphs(columns)
        assert written(found) == written(own)
        constants = [found.constants[name] for name in sorted(found.constants)]
        expected = [own.constants[name] for name in sorted(own.constants)]
        assert all(torch.equal(a, b) for a, b in zip(constants, expected, strict=True))
    assert graphs.num_traced == 6  # only (4, 5) is for both models as (2, 5), which came first


def test_other_columns_are_traced_anew() -> None:
    source = GraphSource(llama(1))
    graphs = Own(source, training=True)
    for length in (9, 7, 6):
        graphs(texts(length))
    masked = texts(8) | {"attention_mask": TensorMeta((2, 8), torch.int64)}
    own = build_graph(source, masked, training=True)
    assert written(graphs(masked)) == written(own)
    assert graphs.num_traced == 3
