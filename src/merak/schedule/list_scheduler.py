"""List scheduling: every rank takes, whenever it is free, the best action that is ready.

It gives the orders of `zero_bubble_v`, and the starting points of `auto`.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from merak.schedule.ir import Action, Kind


class ForwardRule(Enum):
    """Order of ready forwards where a rank holds several stages."""

    LATEST_STAGE = "latest stage first, after backwards"
    LATEST_STAGE_BEFORE_BACKWARDS = "all but the rank's first stage before backwards"
    FEWEST_FORWARDS = "the stage with the fewest forwards first, after backwards"


@dataclass(frozen=True, slots=True)
class Job:
    """Input of the list scheduler: times, ranks and memory, by stage unless noted."""

    num_microbatches: int
    ranks: tuple[int, ...]
    forward_s: tuple[float, ...]
    # Duration of an R; None on stages that save their activations.
    recompute_s: tuple[float | None, ...]
    # What recomputing adds to a B or I without an R.
    inside_s: tuple[float, ...]
    # Of the B or, on stages that split it, of the I.
    gradient_s: tuple[float, ...]
    # Of the W; None on stages that do not split their backward.
    weight_s: tuple[float | None, ...]
    # From stage i to i + 1 and back; 0 on one rank.
    transfer_s: tuple[float, ...]
    # Held from the forward on, gained by recomputation, and left between I and W.
    saved_bytes: tuple[float, ...]
    recomputed_bytes: tuple[float, ...]
    left_bytes: tuple[float, ...]
    # Per rank, for activations alone.
    limit_bytes: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Policy:
    """Priorities of a rank among its ready actions."""

    # Most microbatches in flight, per stage.
    in_flight: tuple[int, ...]
    # How many W may wait for an idle moment, per rank.
    waiting_weights: tuple[int, ...]
    forward_rule: ForwardRule = ForwardRule.LATEST_STAGE
    # Whether a rank that waits recomputes ahead.
    recompute_early: bool = True


@dataclass(slots=True)
class _Rank:
    """State of one rank while its list is made."""

    stages: tuple[int, ...]
    free_at: float = 0.0
    used_bytes: float = 0.0
    actions: list[Action] = field(default_factory=list)
    weights: deque[Action] = field(default_factory=deque)
    # The action whose activations have come back and wait for their gradient, if any.
    recomputed: Action | None = None


@dataclass(slots=True)
class _State:
    """State of all ranks while their lists are made."""

    job: Job
    policy: Policy
    ranks: list[_Rank]
    events: list[tuple[float, int]]
    num_forwards: list[int]
    num_backwards: list[int]
    num_released: list[int]
    # When the input of the next forward, and the gradient of the next backward, is on the rank.
    inputs: list[deque[float]]
    gradients: list[deque[float]]


def list_schedule(job: Job, policy: Policy) -> tuple[tuple[Action, ...], ...] | None:
    """Lists of actions of every rank, by list scheduling.

    Args:
        job: times, ranks and memory.
        policy: priorities of the ranks.

    Returns:
        One list per rank; None where the ranks got stuck on the memory limit.
    """
    state = _start(job, policy)
    while state.events:
        now, number = heapq.heappop(state.events)
        rank = state.ranks[number]
        if now < rank.free_at:
            continue
        action = _choose(state, rank, now, number)
        if action is None:
            continue
        rank.free_at = now + _perform(state, rank, action, now)
        heapq.heappush(state.events, (rank.free_at, number))
    if any(count < job.num_microbatches for count in state.num_released):
        return None
    return tuple(tuple(rank.actions) for rank in state.ranks)


def _start(job: Job, policy: Policy) -> _State:
    num_stages, num_ranks = len(job.ranks), max(job.ranks) + 1
    ranks = [
        _Rank(tuple(s for s in range(num_stages) if job.ranks[s] == r)) for r in range(num_ranks)
    ]
    inputs: list[deque[float]] = [deque() for _ in range(num_stages)]
    inputs[0].extend([0.0] * job.num_microbatches)
    return _State(
        job=job,
        policy=policy,
        ranks=ranks,
        events=[(0.0, number) for number in range(num_ranks)],
        num_forwards=[0] * num_stages,
        num_backwards=[0] * num_stages,
        num_released=[0] * num_stages,
        inputs=inputs,
        gradients=[deque() for _ in range(num_stages)],
    )


def _choose(state: _State, rank: _Rank, now: float, number: int) -> Action | None:
    """The best ready action: backwards, then forwards, then recomputations and weight gradients."""
    forward = _next_forward(state, rank, now)
    first_stage = rank.stages[0]
    rule = state.policy.forward_rule
    if (
        forward is not None
        and rule is ForwardRule.LATEST_STAGE_BEFORE_BACKWARDS
        and forward.stage != first_stage
    ):
        return forward
    for stage in rank.stages:
        gradients = state.gradients[stage]
        if gradients and gradients[0] <= now:
            action = _backward(state, stage)
            if _fits_backward(state, rank, action):
                return action
    if len(rank.weights) > state.policy.waiting_weights[number]:
        return rank.weights[0]
    if forward is not None:
        return forward
    recompute = _next_recompute(state, rank) if state.policy.recompute_early else None
    if recompute is not None:
        return recompute
    return rank.weights[0] if rank.weights else None


def _next_forward(state: _State, rank: _Rank, now: float) -> Action | None:
    ready = [s for s in rank.stages if state.inputs[s] and state.inputs[s][0] <= now]
    allowed = [s for s in ready if _fits_forward(state, rank, s)]
    if not allowed:
        return None
    if state.policy.forward_rule is ForwardRule.FEWEST_FORWARDS:
        stage = min(reversed(allowed), key=lambda s: state.num_forwards[s])
    else:
        stage = allowed[-1]
    return Action(Kind.FORWARD, stage, state.num_forwards[stage])


def _fits_forward(state: _State, rank: _Rank, stage: int) -> bool:
    """Whether a forward leaves memory for the actions up to its own backward."""
    job = state.job
    if state.num_forwards[stage] - state.num_backwards[stage] >= state.policy.in_flight[stage]:
        return False
    back = rank.recomputed.stage if rank.recomputed is not None else None
    reserve = _reserve_bytes(job, rank, stage, back)
    return rank.used_bytes + job.saved_bytes[stage] + reserve <= job.limit_bytes[job.ranks[stage]]


def _reserve_bytes(job: Job, rank: _Rank, stage: int, back: int | None) -> float:
    """Memory of one microbatch on the rank's later stages, and of one more recomputation.

    Args:
        job: times, ranks and memory.
        rank: the rank.
        stage: the stage from which on the microbatch has still to pass.
        back: a stage that is recomputed already, and needs no more memory.
    """
    later = sum(job.saved_bytes[s] for s in rank.stages if s > stage)
    again = max((job.recomputed_bytes[s] for s in rank.stages if s != back), default=0.0)
    return later + again


def _backward(state: _State, stage: int) -> Action:
    split = state.job.weight_s[stage] is not None
    kind = Kind.INPUT_GRADIENT if split else Kind.BACKWARD
    return Action(kind, stage, state.num_backwards[stage])


def _is_recomputed(rank: _Rank, action: Action) -> bool:
    done = rank.recomputed
    return done is not None and (done.stage, done.microbatch) == (action.stage, action.microbatch)


def _fits_backward(state: _State, rank: _Rank, action: Action) -> bool:
    job, stage = state.job, action.stage
    if job.recompute_s[stage] is None or _is_recomputed(rank, action):
        return True
    limit = job.limit_bytes[job.ranks[stage]]
    return rank.used_bytes + job.recomputed_bytes[stage] <= limit


def _next_recompute(state: _State, rank: _Rank) -> Action | None:
    """The recomputation that will be needed first; one at a time."""
    job = state.job
    if rank.recomputed is not None:
        return None
    for stage in reversed(rank.stages):
        microbatch = state.num_backwards[stage]
        if job.recompute_s[stage] is None or microbatch >= state.num_forwards[stage]:
            continue
        needed = job.recomputed_bytes[stage] + _reserve_bytes(job, rank, stage, stage)
        if rank.used_bytes + needed <= job.limit_bytes[job.ranks[stage]]:
            return Action(Kind.RECOMPUTE, stage, microbatch)
    return None


def _perform(state: _State, rank: _Rank, action: Action, now: float) -> float:
    """Append an action to the rank's list; returns its duration."""
    rank.actions.append(action)
    return _BOOK[action.kind](state, rank, action, now)


def _book_forward(state: _State, rank: _Rank, action: Action, now: float) -> float:
    job, stage = state.job, action.stage
    end = now + job.forward_s[stage]
    state.inputs[stage].popleft()
    state.num_forwards[stage] += 1
    rank.used_bytes += job.saved_bytes[stage]
    if stage + 1 < len(job.ranks):
        _deliver(state, state.inputs[stage + 1], stage + 1, end + job.transfer_s[stage])
    else:
        state.gradients[stage].append(end)
    return end - now


def _book_recompute(state: _State, rank: _Rank, action: Action, now: float) -> float:
    rank.recomputed = action
    rank.used_bytes += state.job.recomputed_bytes[action.stage]
    duration = state.job.recompute_s[action.stage]
    assert duration is not None
    return duration


def _book_backward(state: _State, rank: _Rank, action: Action, now: float) -> float:
    job, stage = state.job, action.stage
    duration = job.gradient_s[stage]
    if _is_recomputed(rank, action):
        rank.recomputed = None
        rank.used_bytes -= job.recomputed_bytes[stage]
    elif job.recompute_s[stage] is not None:
        duration += job.inside_s[stage]
    rank.used_bytes -= job.saved_bytes[stage]
    state.gradients[stage].popleft()
    state.num_backwards[stage] += 1
    if action.kind is Kind.INPUT_GRADIENT:
        rank.used_bytes += job.left_bytes[stage]
        rank.weights.append(Action(Kind.WEIGHT_GRADIENT, stage, action.microbatch))
    else:
        state.num_released[stage] += 1
    if stage:
        gradients = state.gradients[stage - 1]
        _deliver(state, gradients, stage - 1, now + duration + job.transfer_s[stage - 1])
    return duration


def _book_weights(state: _State, rank: _Rank, action: Action, now: float) -> float:
    rank.weights.popleft()
    rank.used_bytes -= state.job.left_bytes[action.stage]
    state.num_released[action.stage] += 1
    duration = state.job.weight_s[action.stage]
    assert duration is not None
    return duration


def _deliver(state: _State, queue: deque[float], stage: int, arrival: float) -> None:
    queue.append(arrival)
    heapq.heappush(state.events, (arrival, state.job.ranks[stage]))


_BOOK = {
    Kind.FORWARD: _book_forward,
    Kind.RECOMPUTE: _book_recompute,
    Kind.BACKWARD: _book_backward,
    Kind.INPUT_GRADIENT: _book_backward,
    Kind.WEIGHT_GRADIENT: _book_weights,
}
