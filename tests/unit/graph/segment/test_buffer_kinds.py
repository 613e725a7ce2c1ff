"""Buffers that the forward writes: with what, and so what replicas make of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from merak.graph.segment.buffer_kinds import WrittenBuffer, classify_written_buffers
from merak.graph.segment.build import GraphSource, build_graph
from tests.tiers import one_in
from tests.unit.graph import written_buffers as w
from tests.unit.graph.stages import metas

SAME, MEAN, SAMPLES = WrittenBuffer.SAME, WrittenBuffer.MEAN, WrittenBuffer.SAMPLES

_SPECTRAL = "first.parametrizations.weight.0."
KINDS = {
    w.Blocks: {},
    w.Averaged: {"average": SAME, "count": SAME},
    w.Spectral: {f"{_SPECTRAL}_u": SAME, f"{_SPECTRAL}_v": SAME},
    w.BatchNormed: {
        "norm.num_batches_tracked": SAME,
        "norm.running_mean": MEAN,
        "norm.running_var": MEAN,
    },
    w.Watched: {
        "norm.num_batches_tracked": SAME,
        "norm.running_mean": WrittenBuffer.READ_MEAN,
        "norm.running_var": MEAN,
    },
    w.Queued: {"place": SAME, "queue": SAMPLES},
    w.Held: {"held['mean']": SAMPLES},
    w.Drawn: {"noise": SAMPLES},
    w.Followed: {"average": SAMPLES, "seen": SAMPLES},
}


@one_in(4)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_a_written_buffer_depends_on(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    graph = build_graph(GraphSource(kind()), metas(w.draw(0, 4)), training=True)
    assert classify_written_buffers(graph) == KINDS[kind]


def test_a_norm_in_evaluation_writes_nothing() -> None:
    model = w.BatchNormed()
    graph = build_graph(GraphSource(model), metas(w.draw(0, 4)), training=False)
    assert classify_written_buffers(graph) == {}
