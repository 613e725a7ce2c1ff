"""State of a rank for checkpoints: what its engine and its optimizer hold of the model."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from merak.checkpoint.state import RankState
from merak.core.errors import TrainingError
from merak.engine.engine import Engine


def rank_state(
    engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> RankState:
    """Return the state of this rank; inside of `Engine.whole_model`.

    Args:
        engine: of this rank.
        model: the user's model, holding this rank's parameters.
        optimizer: of this rank's parameters; None to save or load the model alone.

    Raises:
        TrainingError: with an optimizer, while parameters are their averages.
    """
    if optimizer is not None and engine.optimizers.is_averaged:
        raise TrainingError(
            "a checkpoint was to be saved or loaded inside merak.averaged_parameters, where "
            "parameters are their averages; do it behind the context."
        )
    outer: dict[str, torch.Tensor] = {}
    whole = engine.optimizer_params.whole_tensors
    if engine.local_steps is not None and optimizer is not None:
        engine.local_steps.average_states(optimizer, whole)
        outer = engine.local_steps.momenta()
    engine.optimizer_params.take_written()
    masters = engine.optimizer_params.optimizer_tensors()
    held, described = engine.held(), engine.description or None
    state = RankState(model, optimizer, held, engine.shards, engine.mesh, masters, described)
    state = replace(state, outer_momenta=outer, whole_tensors=whole)
    if (compression := engine.compression) is None:
        return state
    return replace(state, further=compression.tensors(), reset=compression.reset)
