"""The steps that an engine runs, which `lower` derives from a schedule, and their channels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

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


# ---- channels ----


class Channel(NamedTuple):
    """Transfers that share a communicator, in which NCCL runs a rank's transfers one by one.

    With one channel for each payload, direction and parity, a rank has one neighbour in a channel,
    and either sends to it or receives from it. So no transfer waits for one that waits for it.

    Attributes:
        payload: what is sent.
        is_upward: whether from a lower to a higher rank.
        is_odd: whether the lower of both ranks is odd.
    """

    payload: Payload
    is_upward: bool
    is_odd: bool


class Link(NamedTuple):
    """Transfers of one payload from one pp rank to another."""

    payload: Payload
    sender: int
    receiver: int


MAX_OPEN_SENDS = 4
"""Sends to other stages whose buffers a rank holds; the next waits for the oldest.

Even sends that are awaited at once cannot deadlock (`merak.schedule.lower` says why). With four, no
schedule is slower than without a limit, when its steps are simulated with random durations.
"""


def channel_of(link: Link) -> Channel:
    """The channel of a link's transfers."""
    is_odd = min(link.sender, link.receiver) % 2 == 1
    return Channel(link.payload, link.sender < link.receiver, is_odd)


def links_of(steps: Sequence[Iterable[Step]]) -> set[Link]:
    """The links that the steps of all ranks of a pipeline use."""
    return {
        Link(step.payload, rank, step.peer)
        for rank, own in enumerate(steps)
        for step in own
        if isinstance(step, Send)
    }


def links_of_pipe(ranks: Sequence[int]) -> set[Link]:
    """The links that a forward through stages on some ranks uses."""
    return {Link(Payload.ACTIVATION, a, b) for a, b in pairwise(ranks) if a != b}
