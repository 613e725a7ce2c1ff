"""The averages that a job keeps of its parameters (`ema_decay`), in the parameters' place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from merak.core.errors import ArgumentsError
from merak.engine.engine import Engine
from merak.graph.weights.laid_out import engine_of


@contextmanager
def averaged_parameters(model: nn.Module) -> Iterator[None]:
    """Context in which a model's parameters are their averages; all ranks enter and leave it.

    Evaluate, generate, or save the model inside; training and its checkpoints are refused there.
    What no update has stepped yet has no average, and is itself. An error inside ends the job: its
    parameters stay averages.

    Args:
        model: the user's, as the trainer or `merak.parallelize` got it, with `ema_decay`.

    Raises:
        ArgumentsError: the job keeps no averages.
    """
    engine: Engine | None = engine_of(model)
    if engine is None:
        raise ArgumentsError(
            "averaged_parameters reads what a laid out job keeps with ema_decay, and this model is "
            "not laid out; train it with MerakTrainer or merak.parallelize first. A loop without "
            "them has torch.optim.swa_utils.AveragedModel."
        )
    with engine.averaged():
        yield
