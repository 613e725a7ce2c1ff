"""Architectures in unequal halves: what both halves give together is what the whole gives."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import fx, nn

from merak.core.errors import ShardError
from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import ModelGraph, Segment
from merak.graph.segment.build import GraphSource, build_graph
from merak.graph.sub_pipelining.sub_microbatch import (
    SampleDims,
    SubMicrobatchSegments,
    find_sample_dims,
    split_segment,
)
from tests.unit.graph.architectures import ARCHITECTURES

Values = Mapping[str, torch.Tensor]

WHOLE = {
    "opt": {"lm_head"},  # the loss
    "t5": {"lm_head"},
    "deberta_v2": {"cls.predictions.decoder"},
    "swin": {"classifier"},
}


def run(segment: Segment, weights: Values, values: Values) -> tuple[torch.Tensor, ...]:
    named = (*segment.parameters, *segment.buffers)
    read = (*segment.columns, *segment.inputs, *segment.batch_only)
    given = [*(weights[n] for n in named), *(values[n] for n in read)]
    result: tuple[torch.Tensor, ...] = fx.GraphModule(nn.Module(), segment.graph)(*given)
    return result


def joined(halves: SubMicrobatchSegments, weights: Values, values: Values) -> list[torch.Tensor]:
    """What both halves give, put together."""
    parts = []
    for own, share in zip(halves.segments, halves.sub_microbatches, strict=True):
        local = dict(values)
        for name in local.keys() & halves.dims.keys():
            dim = halves.dims[name]
            local[name] = values[name].narrow(dim, *share.rows(values[name].shape[dim]))
        parts.append(run(own, weights, local))
    first, second = parts
    return [
        torch.cat([a, b], halves.dims[name]) if name in halves.dims else b
        for name, a, b in zip(halves.segments[0].outputs, first, second, strict=True)
    ]


def kept_whole(graph: ModelGraph, weights: Values, values: dict[str, torch.Tensor]) -> set[str]:
    """Compare all segments that can be halved; those that cannot."""
    samples: SampleDims = find_sample_dims(graph.segments, 3)
    left = set()
    for segment in graph.segments:
        whole = run(segment, weights, values)
        try:
            halves = split_segment(segment, samples)
        except ShardError:
            left.add(segment.name)
        else:
            for found, expected in zip(joined(halves, weights, values), whole, strict=True):
                assert torch.allclose(found, expected, atol=1e-5)
        values |= dict(zip(segment.outputs, whole, strict=True))
    return left


@pytest.mark.parametrize("name", WHOLE)
def test_three_samples_in_sub_microbatches_give_what_the_microbatch_gives(name: str) -> None:
    model = ARCHITECTURES[name].build()
    rows = torch.tensor([0, 1, 0])
    batch = {column: tensor[rows] for column, tensor in ARCHITECTURES[name].batch().items()}
    columns = {column: TensorMeta(tuple(t.shape), t.dtype) for column, t in batch.items()}
    graph = build_graph(GraphSource(model), columns, training=True)
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers()), **graph.constants}
    with torch.no_grad():
        batch_only = run(graph.prologue, weights, batch)
        values = {**batch, **dict(zip(graph.prologue.outputs, batch_only, strict=True))}
        assert kept_whole(graph, weights, values) == WHOLE[name]
