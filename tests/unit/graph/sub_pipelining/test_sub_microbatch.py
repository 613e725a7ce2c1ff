"""Segments in halves give what they give whole, and run in turns."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import fx, nn

from merak.core.errors import ShardError
from merak.core.mesh import Mesh, pretended
from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import ModelGraph, Segment
from merak.graph.joint.all_reduces import all_in_turns
from merak.graph.joint.divide import divide
from merak.graph.joint.parts import parts_of
from merak.graph.segment.build import GraphSource, build_graph
from merak.graph.sub_pipelining.leading_part import leading_cuts
from merak.graph.sub_pipelining.sub_microbatch import SampleDims, split_segment
from merak.graph.tensor_parallel.apply import tensor_parallel
from merak.graph.tensor_parallel.features import Column, Row
from merak.ops.collectives import end_all_reduce
from merak.plan.cost.segments.by_graph import joint_graphs_in_turns
from tests.tiers import one_in

BATCH = 4


class Block(nn.Module):
    """A residual block whose samples do not see one another, unless asked."""

    def __init__(self, across: str = "") -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.drop = nn.Dropout(0.5)
        self.down = nn.Linear(16, 8)
        self.batch_norm, self.group_norm = nn.BatchNorm1d(8), nn.GroupNorm(2, 8)
        self.across = across

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x).view(-1, 8)
        y = self.down(self.drop(torch.relu(self.up(y)))).view_as(x)
        if self.across == "mean":
            y = y - y.mean(0)
        if self.across == "flip":
            y = y.flip(0)
        if self.across == "mixed":
            y = torch.ones(len(y), len(y)).triu() @ y
        if self.across == "batch norm":
            y = self.batch_norm(y)
        if self.across == "group norm":
            y = self.group_norm(y)
        return x + y


class Model(nn.Module):
    def __init__(self, across: str = "") -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(across), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Growing(nn.Module):
    """Gives its loss more than it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x).square().mean()


def graph_of(model: nn.Module, batch: int = BATCH) -> ModelGraph:
    columns = {"x": TensorMeta((batch, 8), torch.float32)}
    return build_graph(GraphSource(model), columns, training=True)


def arguments(segment: Segment, model: nn.Module, values: dict[str, torch.Tensor]) -> list[object]:
    parameters = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    named = (*segment.columns, *segment.inputs, *segment.batch_only)
    return [
        *(parameters[name] for name in segment.parameters),
        *(buffers[name] for name in segment.buffers),
        *(values[name] for name in named),
    ]


def call(segment: Segment, given: Sequence[object]) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(7)
    result: tuple[torch.Tensor, ...] = fx.GraphModule(nn.Module(), segment.graph)(*given)
    return result


@one_in(2)
@pytest.mark.parametrize("batch,within", [(2, ""), (3, "group norm"), (4, ""), (5, "")])
def test_two_sub_microbatches_are_the_microbatch_dropout_included(batch: int, within: str) -> None:
    model = Model(within)
    graph = graph_of(model, batch)
    values = {"x": torch.randn(batch, 8)}
    num_halved = 0
    middle = (batch + 1) // 2
    for segment in graph.segments:
        whole = call(segment, arguments(segment, model, values))
        made = dict(zip(segment.outputs, whole, strict=True))
        if segment is graph.segments[-1]:
            with pytest.raises(ShardError):  # the loss is a mean over the samples
                split_segment(segment, SampleDims(batch))
            break
        halves = split_segment(segment, SampleDims(batch))
        parts = []
        for own, start, stop in zip(halves.segments, (0, middle), (middle, batch), strict=True):
            local = {
                name: v.narrow(halves.dims[name], start, stop - start)
                for name, v in values.items()
                if name in halves.dims
            }
            parts.append(call(own, arguments(own, model, values | local)))
        for position, name in enumerate(segment.outputs):
            joined = torch.cat([part[position] for part in parts], halves.dims[name])
            assert torch.allclose(joined, made[name], atol=1e-6)
        values |= made
        num_halved += 1
    assert num_halved >= 3


@one_in(2)
@pytest.mark.parametrize("across", ["mean", "flip", "mixed", "batch norm"])
def test_what_sees_several_samples_is_not_halved(across: str) -> None:
    refused = 0
    for segment in graph_of(Model(across)).segments[:-1]:
        try:
            split_segment(segment, SampleDims(BATCH))
        except ShardError:
            refused += 1
    assert refused == 1


def test_a_single_sample_cannot_be_split() -> None:
    with pytest.raises(ShardError, match="1 sample cannot be split into sub-microbatches; give a"):
        split_segment(graph_of(Model(), 1).segments[0], SampleDims(1))


def test_a_block_is_cut_from_the_loss_behind_it() -> None:
    model = Model()
    segment = graph_of(model).segments[-1]
    first, rest = next(leading_cuts(segment, SampleDims(BATCH)))
    assert set(first.parameters) == set(segment.parameters) and not rest.parameters
    split_segment(first, SampleDims(BATCH))
    values = {name: torch.randn(BATCH, 8) for name in segment.inputs}
    (expected,) = call(segment, arguments(segment, model, values))
    made = call(first, arguments(first, model, values))
    values |= dict(zip(first.outputs, made, strict=True))
    assert torch.equal(call(rest, arguments(rest, model, values))[0], expected)


def test_a_block_is_not_cut_where_more_would_cross_or_draw() -> None:
    drawing = Model()
    drawing.blocks[-1] = nn.Sequential(Block("mean"), nn.Dropout(0.5))
    assert not list(leading_cuts(graph_of(drawing).segments[-1], SampleDims(BATCH)))
    assert not list(leading_cuts(graph_of(Growing()).segments[-1], SampleDims(BATCH)))


def test_each_sub_microbatch_computes_beside_the_all_reduces_of_the_other() -> None:
    graph = graph_of(Model())
    rewrite = tensor_parallel(graph, {"up": Column(), "down": Row()}, 2)
    device, beside = torch.device("cpu"), []
    for whole in graph.segments[:-1]:
        halves = [rewrite(own)[0] for own in split_segment(whole, SampleDims(BATCH)).segments]
        with pretended(Mesh(1, 2, 1, 0, device, None)):
            joints = joint_graphs_in_turns(halves, device, "cpu")
        parts = all_in_turns([parts_of(joint, divide(joint)) for joint in joints])
        for nodes in (parts.forward.nodes, parts.recompute.nodes, parts.backward.nodes):
            for wait in nodes:
                if wait.target is end_all_reduce:
                    between = nodes[nodes.index(wait.args[0]) : nodes.index(wait)]
                    others = {str(n.target) for n in between if n.graph is not wait.graph}
                    beside.append((wait.graph is joints[0].graph, others))
    # Two blocks with one all-reduce in each direction; the loss needs all samples of the third.
    assert len(beside) == 2 * 2 * 2
    for is_first, others in beside:
        assert {"aten.mm.default", "aten.addmm.default"} & others if is_first else others
