"""Reports of `merak train`: of a training run, and of one that would be."""

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


@dataclass(frozen=True, slots=True)
class DryRunReport:
    """Report of a job that was checked, and not started.

    Args:
        model: class of the model.
        parameters: elements of all its parameters, without adapters.
        data: where its samples come from.
        ranks: that would start here.
        degrees: by axis; None for those that `plan: auto` would choose.
        device: type of the devices that they would compute on.
        output_dir: folder of the results.
        checkpoint: that it would go on from; None for a new start.
    """

    model: str
    parameters: int
    data: str
    ranks: int
    degrees: dict[str, int | None]
    device: str
    output_dir: str
    checkpoint: str | None
