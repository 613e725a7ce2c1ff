"""What is written in one place of a model and read in another is a value between segments."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from merak.graph.ir.ir import ModelGraph
from merak.graph.segment.build import GraphSource, build_graph
from tests.unit.graph.odd_models import WIDTH, rows
from tests.unit.graph.stages import metas


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("scale", torch.ones(()))


class Sums(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(())
        for block in self.blocks:
            x = torch.tanh(block(x))
            total += x.mean()
        return total / 3


class SeenThroughViews(Blocks):
    """A view of what is summed up is read at the end: its memory must be one."""

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(2)
        first = total[:1]
        for block in self.blocks:
            x = torch.tanh(block(x))
            total += x.mean()
        return first.sum()


class OfAnotherType(Blocks):
    """In place the sum stays in half precision; a new tensor would not."""

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float16)
        for block in self.blocks:
            x = torch.tanh(block(x))
            total += x.mean()
        return total.float()


class WrittenFirst(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        self.scale.mul_(0.5)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return (x * self.scale).mean()


def graph_of(model: nn.Module) -> ModelGraph:
    return build_graph(GraphSource(model), metas(rows()), training=True)


def operators(graph: ModelGraph) -> list[str]:
    return [str(n.target) for s in graph.segments for n in s.graph.nodes if n.op == "call_function"]


def test_a_sum_along_the_model_forbids_no_cut() -> None:
    graph = graph_of(Sums())
    assert len(graph.segments) == 2
    assert "aten.add_.Tensor" not in operators(graph)


def test_sums_that_must_stay_in_their_memory_do() -> None:
    for model in (SeenThroughViews(), OfAnotherType()):
        graph = graph_of(model)
        assert len(graph.segments) == 1
        assert operators(graph).count("aten.add_.Tensor") == 3


def test_later_segments_read_a_written_buffer_as_a_value() -> None:
    graph = graph_of(WrittenFirst())
    readers = [segment.index for segment in graph.segments if "scale" in segment.buffers]
    assert len(graph.segments) > 1
    assert readers == [0]
