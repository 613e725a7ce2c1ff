"""From a model and a batch's shapes to its segments, in one call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from merak.core.errors import TraceError
from merak.graph.ir import ModelGraph, TensorMeta
from merak.graph.shard import shard
from merak.graph.trace import LossFunction, trace


@dataclass(frozen=True, slots=True)
class GraphSource:
    """Everything but shapes that determines a model's graph.

    Args:
        model: the user's model; its parameters may be on meta.
        loss_fn: `loss_fn(outputs, batch) -> loss`, where the model computes no loss itself.
        loss_columns: columns that go to the loss function alone, not to the model.
        fixed: keyword arguments of the model that are no tensors.
        device: device type the model will run on.
        cache_dir: where traces are kept; None keeps none.
    """

    model: nn.Module
    loss_fn: LossFunction | None = None
    loss_columns: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    device: torch.device = torch.device("cpu")
    cache_dir: Path | None = None


def build_graph(
    source: GraphSource, columns: Mapping[str, TensorMeta], *, training: bool
) -> ModelGraph:
    """Trace a model at some shapes and cut it into segments.

    Args:
        source: the model, and what is called with it.
        columns: the batch at microbatch shape.
        training: train mode with the loss alone, or eval mode with all outputs.

    Returns:
        The segments.

    Raises:
        TraceError: the model cannot be traced, or gives no loss in training.
    """
    model = source.model
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        traced = trace(
            model,
            columns,
            loss_fn=source.loss_fn,
            loss_columns=source.loss_columns,
            fixed=source.fixed,
            device=source.device,
        )
    finally:
        for module, mode in modes:
            module.training = mode
    if not traced.outputs:
        raise TraceError(
            f"{type(model).__name__} returns no tensor for the columns {', '.join(columns)}; "
            "return a loss, or a dict, tuple or dataclass of tensors."
        )
    return shard(traced, outputs=("loss",) if training else None)
