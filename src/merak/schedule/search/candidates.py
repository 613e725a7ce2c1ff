"""Candidates of `auto`: jobs for the list scheduler, and policies to try on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from merak.schedule.builders.common import v_shape
from merak.schedule.costs import Costs
from merak.schedule.list_scheduler import ForwardRule, Job, Policy


@dataclass(frozen=True, slots=True)
class Request:
    """Arguments of `auto`."""

    num_ranks: int
    num_microbatches: int
    costs: Costs
    # Per rank, for weights and activations together.
    memory_limit_bytes: float
    # Whether backwards are split into I and W, and which stages recompute; None: the best.
    split: bool | None
    recompute: tuple[bool, ...] | None
    max_copies: int


def placements(request: Request) -> tuple[tuple[int, ...], ...]:
    """The ranks of the stages: one each, or round and round, or down and back up."""
    num_ranks, num_stages = request.num_ranks, request.costs.num_stages
    round_and_round = tuple(stage % num_ranks for stage in range(num_stages))
    if num_stages == 2 * num_ranks:
        return (v_shape(num_ranks), round_and_round)
    return (round_and_round,)


def activation_limits(request: Request, ranks: Sequence[int]) -> tuple[float, ...]:
    """Memory for activations on every rank, beside its stages' weights."""
    limits = [request.memory_limit_bytes] * request.num_ranks
    for stage, rank in enumerate(ranks):
        limits[rank] -= request.costs.state_bytes[stage]
    return tuple(limits)


def least_limit(request: Request, ranks: Sequence[int]) -> float:
    """The smallest memory limit with which one microbatch at a time can pass."""
    costs = request.costs
    flags = request.recompute or (True,) * costs.num_stages
    needed = [0.0] * request.num_ranks
    extra = [0.0] * request.num_ranks
    for stage, rank in enumerate(ranks):
        full = costs.activation_bytes[stage]
        saved = costs.checkpoint_bytes[stage] if flags[stage] else full
        needed[rank] += costs.state_bytes[stage] + saved
        extra[rank] = max(extra[rank], full - saved)
    return max(a + b for a, b in zip(needed, extra))


def jobs(request: Request, ranks: tuple[int, ...]) -> Iterator[Job]:
    """Jobs on a placement: every choice of recomputing stages and of split backwards."""
    splits = (True, False) if request.split is None else (request.split,)
    for flags in _recompute_choices(request, ranks):
        for split in splits:
            yield make_job(request, ranks, flags, split)


def policies(job: Job) -> Iterator[Policy]:
    """Policies to try on a job, the most promising first."""
    num_stages, num_ranks = len(job.ranks), len(job.limit_bytes)
    num_microbatches = job.num_microbatches
    several = num_stages > num_ranks
    depth = [num_stages - stage for stage in range(num_stages)]
    slacks = [
        depth,
        [d + 1 for d in depth],
        [d + 2 for d in depth],
        [2 * d - 1 for d in depth],
        [num_microbatches] * num_stages,
    ]
    rules = tuple(ForwardRule) if several else (ForwardRule.LATEST_STAGE,)
    waits = [(2 * num_microbatches,) * num_ranks]
    if any(weight is not None for weight in job.weight_s):
        waits.insert(0, tuple(range(num_ranks)))
        waits.append((num_ranks,) * num_ranks)
        waits.append((0,) * num_ranks)
    for in_flight in reversed(slacks) if several else slacks:
        for rule in rules:
            for waiting in waits:
                yield Policy(tuple(in_flight), waiting, rule)


def _recompute_choices(request: Request, ranks: Sequence[int]) -> list[tuple[bool, ...]]:
    num_stages = request.costs.num_stages
    if request.recompute is not None:
        return [request.recompute]
    none, every = (False,) * num_stages, (True,) * num_stages
    limits = activation_limits(request, ranks)
    # Recompute only where not even the microbatches of 1F1B fit whole.
    needed = tuple(
        (num_stages - stage) * request.costs.activation_bytes[stage] > limits[rank]
        for stage, rank in enumerate(ranks)
    )
    last_kept = (*every[:-1], False)
    return list(dict.fromkeys((none, needed, last_kept, every)))


def make_job(request: Request, ranks: tuple[int, ...], flags: tuple[bool, ...], split: bool) -> Job:
    """Job on a placement, with given recomputing stages and kind of backward."""
    costs = request.costs
    saved = tuple(
        checkpoint if flag else full
        for flag, checkpoint, full in zip(flags, costs.checkpoint_bytes, costs.activation_bytes)
    )
    transfer = tuple(
        0.0 if ranks[s] == ranks[s + 1] else link.latency_s + size / link.bandwidth_bytes_per_s
        for s, (link, size) in enumerate(zip(costs.links, costs.boundary_bytes))
    )
    return Job(
        num_microbatches=request.num_microbatches,
        ranks=ranks,
        forward_s=costs.forward_s,
        recompute_s=tuple(r if flag else None for r, flag in zip(costs.recompute_s, flags)),
        inside_s=(costs.recompute_in_input_gradient_s if split else costs.recompute_in_backward_s),
        gradient_s=costs.input_gradient_s if split else costs.backward_s,
        weight_s=costs.weight_gradient_s if split else (None,) * costs.num_stages,
        transfer_s=transfer,
        saved_bytes=saved,
        recomputed_bytes=tuple(full - k for full, k in zip(costs.activation_bytes, saved)),
        left_bytes=costs.weight_gradient_bytes,
        limit_bytes=activation_limits(request, ranks),
    )


def lower_bound(job: Job) -> float:
    """A time that no order of a job's actions can beat.

    A rank waits for the first input of each of its stages, has all its work to do, and after its
    last gradient the stages before still pass theirs on.
    """
    bound, head, tail = 0.0, 0.0, 0.0
    work = [0.0] * len(job.limit_bytes)
    first_head = [float("inf")] * len(job.limit_bytes)
    for stage, rank in enumerate(job.ranks):
        first_head[rank] = min(first_head[rank], head)
        passing = job.forward_s[stage] + job.gradient_s[stage]
        passing += min(job.recompute_s[stage] or 0.0, job.inside_s[stage])
        last = job.weight_s[0] or 0.0
        if stage:
            bound = max(bound, head + job.num_microbatches * passing + tail + last)
        work[rank] += job.num_microbatches * (passing + (job.weight_s[stage] or 0.0))
        transfer = job.transfer_s[stage] if stage < len(job.transfer_s) else 0.0
        head += job.forward_s[stage] + transfer
        tail += job.gradient_s[stage] + transfer
    return max(bound, *(a + b for a, b in zip(first_head, work)))
