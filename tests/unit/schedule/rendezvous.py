"""A simulator of lowered steps whose sends complete only once their receives are posted."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from merak.schedule.ir import GRADIENT_KINDS, Action, Kind, Schedule
from merak.schedule.steps import Compute, OptimizerStep, Payload, Receive, ReduceGradients, Send
from merak.schedule.steps import Step as AnyStep

UNIT = {Kind.BACKWARD: 2.0}
Open = tuple[int, Receive, float]
"""A send: the receiving rank, the receive that matches it, and when it began."""


@dataclass
class Durations:
    """What actions and transfers take: every action its unit times a random factor."""

    latency: float = 0.0
    spread: float = 0.0
    seed: int = 0

    def of(self, rank: int, action: Action) -> float:
        own = random.Random(f"{self.seed} {rank} {action}")
        return UNIT.get(action.kind, 1.0) * own.lognormvariate(0.0, self.spread)


@dataclass
class Run:
    """A run of all ranks' steps with at most `window` open sends on a rank."""

    schedule: Schedule
    steps: Sequence[Sequence[AnyStep]]
    window: int
    durations: Durations = field(default_factory=Durations)

    def __post_init__(self) -> None:
        count = len(self.steps)
        self.position, self.clock = [0] * count, [0.0] * count
        self.sends: list[deque[Open]] = [deque() for _ in range(count)]
        self.posted: dict[tuple[int, Receive], float] = {}
        self.sent: dict[tuple[int, Receive], Open] = {}
        self.reduced: dict[tuple[int, int], dict[int, float]] = {}

    def finish(self) -> float | None:
        """When the last rank is done; None for a deadlock."""
        moving = True
        while moving:
            moving = any([self._advance(rank) for rank in range(len(self.steps))])
        done = all(p == len(own) for p, own in zip(self.position, self.steps, strict=True))
        return max(self.clock) if done and not any(self._left(r) for r in self.ranks) else None

    @property
    def ranks(self) -> range:
        return range(len(self.steps))

    def _left(self, rank: int) -> bool:
        """Whether a rank's last sends never complete."""
        ends = [self._completes(send) for send in self.sends[rank]]
        self.clock[rank] = max([self.clock[rank], *(end for end in ends if end is not None)])
        return None in ends

    def _completes(self, send: Open) -> float | None:
        peer, receive, began = send
        posted = self.posted.get((peer, receive))
        return None if posted is None else max(began, posted) + self.durations.latency

    def _advance(self, rank: int) -> bool:
        moved = False
        while self._has_room(rank) and self.position[rank] < len(self.steps[rank]):
            ready = self._ready(rank, self.steps[rank][self.position[rank]])
            if ready is None:
                break
            self._perform(rank, self.steps[rank][self.position[rank]], ready)
            self.position[rank] += 1
            moved = True
        return moved

    def _has_room(self, rank: int) -> bool:
        while len(self.sends[rank]) > self.window:
            end = self._completes(self.sends[rank][0])
            if end is None:
                return False
            self.clock[rank] = max(self.clock[rank], end)
            self.sends[rank].popleft()
        return True

    def _ready(self, rank: int, step: AnyStep) -> float | None:
        """When a step can begin; None for not yet."""
        own = self.clock[rank]
        if isinstance(step, Compute) and (needed := self._needed(rank, step.action)) is not None:
            send = self.sent.get((rank, needed))
            end = None if send is None else self._completes(send)
            return None if end is None else max(own, end)
        if isinstance(step, OptimizerStep):
            for stage in step.stages:
                holders = {r for r in self.ranks if stage in self.schedule.stages_of(r)}
                reduced = self.reduced.get((stage, step.update), {})
                if reduced.keys() < holders:
                    return None
                own = max(own, *reduced.values())
        return own

    def _needed(self, rank: int, action: Action) -> Receive | None:
        payload, producer = Payload.ACTIVATION, action.stage - 1
        if action.kind in GRADIENT_KINDS:
            payload, producer = Payload.GRADIENT, action.stage + 1
        elif action.kind is not Kind.FORWARD:
            return None
        if not 0 <= producer < self.schedule.num_stages:
            return None
        peer = self.schedule.rank_of(producer, action.microbatch)
        return None if peer == rank else Receive(payload, producer, action.microbatch, peer)

    def _perform(self, rank: int, step: AnyStep, now: float) -> None:
        self.clock[rank] = now
        if isinstance(step, Compute):
            self.clock[rank] += self.durations.of(rank, step.action)
        elif isinstance(step, Receive):
            self.posted[rank, step] = now
        elif isinstance(step, Send):
            receive = Receive(step.payload, step.stage, step.microbatch, rank)
            self.sent[step.peer, receive] = send = (step.peer, receive, now)
            self.sends[rank].append(send)
        elif isinstance(step, ReduceGradients):
            self.reduced.setdefault((step.stage, step.update), {})[rank] = now
