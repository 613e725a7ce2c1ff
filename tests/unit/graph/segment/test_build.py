"""From a model to its segments in one call."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from merak import empty_weights
from merak.core.errors import TraceError
from merak.core.tensor_meta import TensorMeta
from merak.graph.segment.build import GraphSource, build_graph, build_timed
from tests.unit.graph import families, odd_models
from tests.unit.graph.odd_models import Layers
from tests.unit.graph.stages import metas

ROWS = {"x": TensorMeta((4, 8), torch.float32)}


def test_training_keeps_the_loss_alone() -> None:
    source = GraphSource(odd_models.Everything())
    trained = build_graph(source, ROWS, training=True)
    assert list(trained.outputs) == ["loss"]
    assert trained.loss == trained.outputs["loss"]
    evaluated = build_graph(source, ROWS, training=False)
    assert list(evaluated.outputs)[:3] == ["loss", "again", "x"]
    assert evaluated.outputs["nested.output1.deep"]


def test_prediction_needs_no_loss() -> None:
    batch = metas(families.batch_for("gpt2"))
    del batch["labels"]
    source = GraphSource(families.gpt2(1))
    graph = build_graph(source, batch, training=False)
    assert graph.loss is None
    assert list(graph.outputs) == ["logits"]
    with pytest.raises(TraceError, match="returns no loss for the columns input_ids; it returns l"):
        build_graph(source, batch, training=True)


class Modes(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return (self.b(h) if self.training else h).mean()


def test_modes_are_traced_apart() -> None:
    source = GraphSource(Modes().eval())
    trained, evaluated = (build_graph(source, ROWS, training=mode) for mode in (True, False))
    read = [{n for s in g.segments for n in s.parameters} for g in (trained, evaluated)]
    assert read == [{"a.weight", "a.bias", "b.weight", "b.bias"}, {"a.weight", "a.bias"}]
    assert not source.model.training


class Fixed(Layers):
    def forward(self, x: Tensor, layers: int = 1, name: str = "a") -> Tensor:
        for _ in range(layers):
            x = torch.relu(getattr(self, name)(x))
        return x.mean()


def test_arguments_that_are_no_tensors() -> None:
    source = GraphSource(Fixed(), fixed={"layers": 3, "name": "b"})
    graph = build_graph(source, ROWS, training=True)
    assert [s.parameters for s in graph.segments] == [("b.weight", "b.bias")] * 3


class Scores(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)


def test_columns_of_the_loss_alone() -> None:
    def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return (output - batch["x2"]).pow(2).mean() * batch["weight"]

    columns = ROWS | {
        "x2": TensorMeta((4, 8), torch.float32),
        "weight": TensorMeta((), torch.float32),
    }
    graph = build_graph(GraphSource(Scores(), loss_fn=loss), columns, training=True)
    assert {name for s in graph.segments for name in s.columns} == {"x", "x2", "weight"}


class TakesAll(Layers):
    def forward(self, **columns: Tensor) -> Tensor:
        assert set(columns) == {"x"}
        return self.a(columns["x"])


def test_loss_columns_are_kept_from_a_model_that_takes_all() -> None:
    source = GraphSource(TakesAll(), loss_fn=lambda o, b: (o * b["y"]).mean(), loss_columns=("y",))
    columns = ROWS | {"y": TensorMeta((4, 8), torch.float32)}
    assert build_graph(source, columns, training=True).loss is not None


def test_weights_that_are_not_there_are_not_needed() -> None:
    with empty_weights():
        model = families.gpt2(2)
    graph = build_graph(GraphSource(model), metas(families.batch_for("gpt2")), training=True)
    assert all(p.is_meta for p in model.parameters())
    assert graph.tied == {"lm_head.weight": "transformer.wte.weight"}
    assert "transformer.wte.weight" in graph.segments[-1].parameters


def test_a_ranks_shards_of_the_parameters_change_nothing() -> None:
    model = odd_models.Mlp()
    source = GraphSource(model)
    share = nn.Parameter(torch.zeros(4, 8))
    model.a.weight = share
    graph = build_graph(source, ROWS, training=True)
    assert graph.parameters["a.weight"].shape == (8, 8)
    assert model.a.weight is share


def test_times_add_up(tmp_path: Path) -> None:
    source = GraphSource(odd_models.Mlp(), cache_dir=tmp_path)
    first, second = (build_timed(source, ROWS, training=True) for _ in range(2))
    assert first.trace_s > 0
    assert first.shard_s > 0
    assert second.cached
    assert second.shard_s == 0
