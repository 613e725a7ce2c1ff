"""What `merak profile` runs of a segment: all of a backward, whole and split. Never how fast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from merak.engine.profile import segments as profiled
from merak.engine.profile.segments import measure_segments
from merak.engine.profile.stopwatch import Stopwatch
from merak.graph.segment.build import GraphSource
from merak.plan.price.workload import Workload
from tests.unit.engine.models import gpt2, text_batch


class Runs(Stopwatch):
    """Runs each call once, and takes a second for it."""

    def after(self, before: Callable[[], Any], work: Callable[[Any], object]) -> float:
        work(before())
        return 1.0


def test_backwards_give_all_gradients(monkeypatch: Any) -> None:
    made: list[Any] = []

    class Seen(profiled._Inputs):
        def __post_init__(self) -> None:
            super().__post_init__()
            made.append(self)

    monkeypatch.setattr(profiled, "_Inputs", Seen)
    batch = text_batch(1)
    columns = tuple((n, profiled.TensorMeta(tuple(c.shape), c.dtype)) for n, c in batch.items())
    workload = Workload(GraphSource(gpt2()), lambda _: columns, 1)
    watch = Runs(torch.device("cpu"))
    rows = []
    for row in measure_segments(workload, lambda _: batch, watch, 1, 1):
        own = made[-1]
        for name, weight in own.weights.items():
            assert weight.grad is not None, (row.name, name)
        rows.append(row)
    assert len(rows) == len({row.digest for row in rows}) >= 4
    assert all(row.seconds.weight_gradient_s == 1.0 for row in rows)
