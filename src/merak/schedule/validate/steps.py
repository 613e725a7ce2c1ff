"""Rules for lowered steps: transfers that meet, and gradients that are reduced exactly once."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest

from merak.schedule.ir import FINAL_KINDS, GRADIENT_KINDS, Action, Kind, Schedule
from merak.schedule.steps import (
    MAX_OPEN_SENDS,
    Compute,
    Link,
    OptimizerStep,
    Payload,
    Receive,
    ReduceGradients,
    Send,
    Step,
    channel_of,
)

Steps = Sequence[Sequence[Step]]
StepRule = Callable[[Schedule, Steps], Iterator[str]]


def check_steps(schedule: Schedule, steps: Steps) -> tuple[str, ...]:
    """Find the problems that make an engine hang on these steps, or reduce gradients wrongly.

    Args:
        schedule: what the steps were lowered from.
        steps: of every rank.

    Returns:
        Sentences; none for steps that are right.
    """
    return tuple(problem for rule in STEP_RULES for problem in rule(schedule, steps))


def _transfers_match(schedule: Schedule, steps: Steps) -> Iterator[str]:
    """On every ordered pair of ranks and per payload, receives stand in the order of the sends."""
    sends, receives = defaultdict(list), defaultdict(list)
    for rank, own in enumerate(steps):
        for step in own:
            if isinstance(step, Send):
                sends[rank, step.peer, step.payload].append((step.stage, step.microbatch))
            elif isinstance(step, Receive):
                receives[step.peer, rank, step.payload].append((step.stage, step.microbatch))
    for channel in sorted(sends.keys() | receives.keys(), key=str):
        sender, receiver, payload = channel
        for number, (sent, received) in enumerate(zip_longest(sends[channel], receives[channel])):
            if sent != received:
                yield (
                    f"{payload.value} {number} from rank {sender} to rank {receiver} is sent as "
                    f"(stage, microbatch) {sent} and received as {received}."
                )
                break


def _inputs_are_received(schedule: Schedule, steps: Steps) -> Iterator[str]:
    """Receives are posted before the action that takes their data."""
    for rank, own in enumerate(steps):
        posted = set()
        for step in own:
            if isinstance(step, Receive):
                posted.add((step.payload, step.stage, step.microbatch))
            elif isinstance(step, Compute):
                needed = _needed(schedule, step.action)
                if needed is not None and needed not in posted:
                    label = schedule.label(step.action)
                    yield f"{label} of rank {rank} runs before its {needed[0].value} is asked for."


def _needed(schedule: Schedule, action: Action) -> tuple[Payload, int, int] | None:
    """The transfer that an action takes from another rank, if any."""
    if action.kind is Kind.FORWARD:
        payload, producer = Payload.ACTIVATION, action.stage - 1
    elif action.kind in GRADIENT_KINDS:
        payload, producer = Payload.GRADIENT, action.stage + 1
    else:
        return None
    microbatch = action.microbatch
    if not 0 <= producer < schedule.num_stages:
        return None
    if schedule.rank_of(producer, microbatch) == schedule.rank_of(action.stage, microbatch):
        return None
    return payload, producer, microbatch


def _rendezvous_completes(schedule: Schedule, steps: Steps) -> Iterator[str]:
    """Run the steps with sends that wait until their receive is posted, and see who gets stuck."""
    posted: set[tuple[int, Receive]] = set()
    sent: set[tuple[int, Payload, int, int]] = set()
    position = [0] * len(steps)
    moving = True
    while moving:
        moving = False
        for rank, own in enumerate(steps):
            while position[rank] < len(own):
                step = own[position[rank]]
                if isinstance(step, Receive):
                    posted.add((rank, step))
                elif isinstance(step, Send):
                    mirror = Receive(step.payload, step.stage, step.microbatch, rank)
                    if (step.peer, mirror) not in posted:
                        break
                    sent.add((step.peer, step.payload, step.stage, step.microbatch))
                elif isinstance(step, Compute):
                    needed = _needed(schedule, step.action)
                    if needed is not None and (rank, *needed) not in sent:
                        break
                position[rank] += 1
                moving = True
    yield from _hangs(schedule, "every send waits for its receive", steps, position)


class _SerialTransfers:
    """Transfers of all ranks, of which each rank runs those of a channel one after another.

    Source: torch's ProcessGroupNCCL, which has one stream for a group's unbatched transfers.

    Args:
        channel: of a link.
    """

    def __init__(self, channel: Callable[[Link], object]) -> None:
        self._channel = channel
        self._queues: dict[object, deque[object]] = defaultdict(deque)
        self._ends: dict[object, tuple[object, object]] = {}
        self.complete: set[object] = set()

    def start(self, rank: int, step: Send | Receive) -> object:
        """Let a rank come to a transfer; its name."""
        sender, receiver = (rank, step.peer) if isinstance(step, Send) else (step.peer, rank)
        channel = self._channel(Link(step.payload, sender, receiver))
        name = (step.payload, step.stage, step.microbatch)
        self._ends[name] = ((sender, channel), (receiver, channel))
        self._queues[rank, channel].append(name)
        self._run(name)
        return name

    def _run(self, first: object) -> None:
        """Complete a transfer that is next on both ranks, and those that waited behind it."""
        tried = [first]
        while tried:
            name = tried.pop()
            queues = [self._queues[end] for end in self._ends[name]]
            if all(queue and queue[0] == name for queue in queues):
                self.complete.add(name)
                for queue in queues:
                    queue.popleft()
                    tried.extend(list(queue)[:1])


def serial_channels_complete(
    schedule: Schedule, steps: Steps, channel: Callable[[Link], object] = channel_of
) -> Iterator[str]:
    """Run the steps with the transfers of a channel one by one, and see who gets stuck.

    Args:
        schedule: what the steps were lowered from.
        steps: of every rank.
        channel: of a link.

    Yields:
        A sentence for each rank that hangs.
    """
    transfers = _SerialTransfers(channel)
    sends: list[deque[object]] = [deque() for _ in steps]
    position = [0] * len(steps)

    def can_go_on(rank: int, step: Step) -> bool:
        if isinstance(step, Compute):
            needed = _needed(schedule, step.action)
            return needed is None or needed in transfers.complete
        while len(sends[rank]) > MAX_OPEN_SENDS and sends[rank][0] in transfers.complete:
            sends[rank].popleft()
        return len(sends[rank]) <= MAX_OPEN_SENDS

    moving = True
    while moving:
        moving = False
        for rank, own in enumerate(steps):
            while position[rank] < len(own) and can_go_on(rank, own[position[rank]]):
                step = own[position[rank]]
                if isinstance(step, Send | Receive):
                    started = transfers.start(rank, step)
                    sends[rank].extend([started] * isinstance(step, Send))
                position[rank] += 1
                moving = True
    when = "transfers of a channel run one after another, as over NCCL"
    fix = "; change the order, or put consecutive stages on neighbouring ranks"
    yield from _hangs(schedule, when, steps, position, fix)


def _hangs(
    schedule: Schedule, when: str, steps: Steps, position: Sequence[int], fix: str = ""
) -> Iterator[str]:
    """A sentence for each rank that has not come to the end of its steps."""
    for rank, own in enumerate(steps):
        if position[rank] < len(own):
            step = own[position[rank]]
            what = schedule.label(step.action) if isinstance(step, Compute) else str(step)
            yield f"if {when}, rank {rank} hangs at step {position[rank]}, {what}{fix}."


def _gradients_are_reduced_once(schedule: Schedule, steps: Steps) -> Iterator[str]:
    """Every rank that holds a stage reduces it once per update, complete, and then steps.

    A forward-only schedule has no gradients.
    """
    for rank, own in enumerate(steps):
        wanted = {
            (stage, update)
            for stage in schedule.stages_of(rank)
            for update in range(schedule.num_updates if schedule.has_backwards else 0)
        }
        reductions = Counter(
            (step.stage, step.update) for step in own if isinstance(step, ReduceGradients)
        )
        for stage, update in sorted(wanted | reductions.keys()):
            count = reductions[stage, update]
            if count != ((stage, update) in wanted):
                yield (
                    f"rank {rank} reduces the gradients of stage {stage} in update {update} "
                    f"{count} times."
                )
        yield from _nothing_is_late(schedule, rank, own)


def _nothing_is_late(schedule: Schedule, rank: int, own: Sequence[Step]) -> Iterator[str]:
    reduced: set[tuple[int, int]] = set()
    for step in own:
        if isinstance(step, ReduceGradients):
            reduced.add((step.stage, step.update))
        elif isinstance(step, Compute) and step.action.kind in FINAL_KINDS:
            action = step.action
            if (action.stage, schedule.update_of(action.microbatch)) in reduced:
                label = schedule.label(action)
                yield f"{label} of rank {rank} comes after its gradients have been reduced."
        elif isinstance(step, OptimizerStep):
            for stage in step.stages:
                if (stage, step.update) not in reduced:
                    yield f"rank {rank} steps stage {stage} before its gradients are reduced."


def _reductions_come_in_one_order(schedule: Schedule, steps: Steps) -> Iterator[str]:
    """Ranks that share several stages start the reductions of these in one order."""
    orders = [[(s.stage, s.update) for s in own if isinstance(s, ReduceGradients)] for own in steps]
    for rank, order in enumerate(orders):
        for other in range(rank + 1, len(orders)):
            shared = set(order) & set(orders[other])
            mine = [item for item in order if item in shared]
            theirs = [item for item in orders[other] if item in shared]
            if mine != theirs:
                yield (
                    f"ranks {rank} and {other} share stages and reduce them in different orders: "
                    f"(stage, update) {mine} and {theirs}."
                )


STEP_RULES: tuple[StepRule, ...] = (
    _transfers_match,
    _inputs_are_received,
    _rendezvous_completes,
    serial_channels_complete,
    _gradients_are_reduced_once,
    _reductions_come_in_one_order,
)
