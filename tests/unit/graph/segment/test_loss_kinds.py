"""Losses that a loop hands over and that are no loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from merak.core.errors import TraceError
from merak.data import signature
from merak.graph.segment.build import GraphSource, build_graph

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
