"""Channels: which transfers between pp ranks share a communicator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from merak.schedule.steps import Payload, Send, Step


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
