"""Report of a training run, as `merak train` prints it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TrainReport:
    """Report of a finished training run.

    Args:
        loss: mean training loss since the log before the last one.
        steps: optimizer steps.
        tokens_per_second: input tokens that training took, over all replicas, by its run time;
            None for a model that reads no tokens.
        checkpoint: folder of the trained model, which `from_pretrained` reads.
        eval_loss: loss on the held-out samples; None where there are none.
        seconds: run time of training.
    """

    loss: float
    steps: int
    tokens_per_second: float | None
    checkpoint: str
    eval_loss: float | None
    seconds: float
