"""The steps that an engine runs, which `merak.schedule.lower` derives from a schedule."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from merak.schedule.ir import Action


class Payload(Enum):
    """Content of a transfer; each payload has its own channel between two ranks."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"


@dataclass(frozen=True, slots=True)
class Compute:
    """Perform an action; first wait for its input from another rank."""

    action: Action


@dataclass(frozen=True, slots=True)
class Send:
    """Send the output of the action before.

    `stage` is the stage that produced it, here and in the matching `Receive`: activations go from
    `stage` to `stage + 1`, gradients of a stage's input from `stage` to `stage - 1`.
    """

    payload: Payload
    stage: int
    microbatch: int
    peer: int


@dataclass(frozen=True, slots=True)
class Receive:
    """Post the receive of the matching `Send`, without waiting for it."""

    payload: Payload
    stage: int
    microbatch: int
    peer: int


@dataclass(frozen=True, slots=True)
class ReduceGradients:
    """Start the reduction of a stage's gradients over all its replicas, without waiting for it.

    Every rank that holds the stage has this step once per update, also where it worked on none of
    the update's microbatches: there it gives zeros.
    """

    stage: int
    update: int


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """Wait for the reductions of some stages, then update their weights."""

    stages: tuple[int, ...]
    update: int


Step = Compute | Send | Receive | ReduceGradients | OptimizerStep
