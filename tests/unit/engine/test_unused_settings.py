"""What is wrong is refused also in a job that has no use for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from merak.core.errors import PlanError, ShardError
from merak.core.mesh import Mesh
from merak.core.tensor_meta import TensorMeta
from merak.engine.build import forecast_of
from merak.graph.segment.build import GraphSource
from merak.graph.tensor_parallel.features import Column, Row
from merak.plan.engine_options import EngineOptions
from tests.unit.graph.odd_models import Mlp

ONE = Mesh(1, 1, 1, 0, torch.device("cpu"), None)


def look(**options: object) -> None:
    model = Mlp()
    sample = (("x", TensorMeta((4, model.a.in_features), torch.float32)),)
    forecast_of(GraphSource(model), sample, ONE, EngineOptions(**options))  # type: ignore[arg-type]


def test_a_feature_dict_without_tensor_parallelism() -> None:
    look(feature_dict={"a": Column(), "b": Row()})
    with pytest.raises(ShardError, match="pattern 'nowhere' matches no parameter of the model"):
        look(feature_dict={"nowhere": Column()})


def test_segment_times_without_a_pipeline(tmp_path: Path) -> None:
    (tmp_path / "times.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(PlanError, match="holds no segment times"):
        look(segment_times=tmp_path / "times.json")
