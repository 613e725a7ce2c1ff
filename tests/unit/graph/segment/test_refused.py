"""Losses that are no loss, types that no kernel takes, and models in wrappers of others."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from merak.core.errors import TraceError
from merak.data import signature
from merak.graph.segment.build import GraphSource, build_graph


class Model(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.layers(x * 1), labels)}


CASES = [
    (nn.Linear(4, 4), torch.zeros(2, 4, dtype=torch.float64), torch.int64, "x", "float64"),
    (nn.Linear(4, 4), torch.zeros(2, 4, dtype=torch.int64), torch.int64, "x", "int64"),
    (nn.Linear(4, 4).double(), torch.zeros(2, 4), torch.int64, "x", "float32"),
    (nn.LayerNorm(4), torch.zeros(2, 4, dtype=torch.float64), torch.int64, "x", "float64"),
    (nn.Conv1d(4, 4, 1), torch.zeros(2, 4, 1, dtype=torch.float64), torch.int64, "x", "float64"),
    (nn.Linear(4, 4), torch.zeros(2, 4), torch.int32, "labels", "int32"),
]


@pytest.mark.parametrize(("layer", "x", "labels", "column", "dtype"), CASES)
def test_a_type_that_no_kernel_takes_is_refused_before_it_runs(
    layer: nn.Module, x: torch.Tensor, labels: torch.dtype, column: str, dtype: str
) -> None:
    shape = (2,) if x.dim() == 2 else (2, 1)
    batch = {"x": x, "labels": torch.zeros(shape, dtype=labels)}
    model = Model(layer)
    with pytest.raises((RuntimeError, NotImplementedError)):
        model(**batch)
    with pytest.raises(TraceError) as caught:
        build_graph(GraphSource(model), dict(signature(batch).columns), training=True)
    assert "fails" in str(caught.value)
    if not isinstance(layer, nn.Conv1d):  # torch's own operator tells, without the column
        found = re.search(rf"column '{column}' of the batch is torch.{dtype}", str(caught.value))
        assert found, str(caught.value)


def test_wrappers_that_share_out_work_are_refused() -> None:
    with pytest.raises(TraceError, match=r"the model is a DataParallel, .* \(its \.module\)"):
        GraphSource(nn.DataParallel(nn.Linear(4, 4)))
    GraphSource(nn.Sequential(nn.DataParallel(nn.Linear(4, 4))))  # one device: runs as it is


BATCH = {"input": torch.zeros(2, 4), "target": torch.zeros(2, 4)}
NO_TENSOR = "the loss function returns what is no tensor"


def _mean(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(outputs, batch["target"])


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (
            lambda o, b: (_mean(o, b), {"accuracy": 1.0}),
            NO_TENSOR,
        ),
        (lambda o, b: None, NO_TENSOR),
        (lambda o, b: _mean(o, b).item(), NO_TENSOR),
        (nn.MSELoss(), "the loss function fails, traced or not"),
    ],
)
def test_what_is_no_loss_is_refused_by_name(loss_fn: Callable[..., Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        build_graph(
            GraphSource(nn.Linear(4, 4), loss_fn), dict(signature(BATCH).columns), training=True
        )
