"""Replay of a measured step: the simulator with measured times, for this and other schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import fmean, median

from merak.record.idle import transfer_s
from merak.record.run import JobRecord, MeasuredStep
from merak.schedule.action_table import tabulate
from merak.schedule.costs import Costs, Link, stage_costs
from merak.schedule.ir import Kind
from merak.schedule.simulator.memory import recomputes_inside
from merak.schedule.simulator.simulate import Simulation, simulate

_Seconds = Mapping[tuple[Kind, int, bool], float]
"""Median seconds by kind, stage, and whether it recomputes inside."""


def typical_step(steps: tuple[MeasuredStep, ...]) -> MeasuredStep:
    """The step of median length among those of the most frequent schedule."""
    counts = [sum(own.schedule == other.schedule for other in steps) for own in steps]
    same = [own for own, number in zip(steps, counts) if number == max(counts)]
    return sorted(same, key=lambda own: own.pipeline_s)[(len(same) - 1) // 2]


def measured_costs(step: MeasuredStep, *, transfers: bool = True) -> Costs:
    """Costs of the stages as they were measured, medians over the microbatches.

    Args:
        step: a measured one.
        transfers: whether outputs take as long between ranks as they were seen to.
    """
    schedule = step.schedule
    seconds = _medians(step)
    stages = range(schedule.num_stages)

    def of(kind: Kind, stage: int, recomputes: bool = False) -> float | None:
        return seconds.get((kind, stage, recomputes))

    forward = tuple(of(Kind.FORWARD, s) or 0.0 for s in stages)
    recompute = tuple(_known(of(Kind.RECOMPUTE, s), forward[s]) for s in stages)
    return stage_costs(
        forward,
        tuple(_backward(of, s, recompute[s]) for s in stages),
        recompute_s=recompute,
        input_gradient_s=tuple(_half(of, Kind.INPUT_GRADIENT, s, recompute[s]) for s in stages),
        weight_gradient_s=tuple(_half(of, Kind.WEIGHT_GRADIENT, s, recompute[s]) for s in stages),
        links=_links(step) if transfers else (Link(),) * (schedule.num_stages - 1),
    )


def expected_costs(job: JobRecord) -> Costs | None:
    """Costs of the stages as they were expected before the first step; None where unknown.

    Args:
        job: as it was laid out.
    """
    if not job.has_times:
        return None
    times = [(own.forward_s or 0.0, own.backward_s or 0.0) for own in job.segments]
    return stage_costs(
        tuple(sum(times[i][0] for i in own) for own in job.stages),
        tuple(sum(times[i][1] for i in own) for own in job.stages),
        recompute_s=job.recompute_s,
    )


def replay(step: MeasuredStep, *, transfers: bool = True) -> Simulation:
    """Simulate a step's schedule with its own measured times."""
    return simulate(step.schedule, measured_costs(step, transfers=transfers))


def even(costs: Costs) -> Costs:
    """Costs of equal stages with the same sums, for what uneven stages cost.

    Args:
        costs: of the stages.
    """
    count = costs.num_stages

    def mean(values: tuple[float, ...]) -> tuple[float, ...]:
        return (fmean(values),) * count

    return stage_costs(
        mean(costs.forward_s),
        mean(costs.backward_s),
        recompute_s=mean(costs.recompute_s),
        input_gradient_s=mean(costs.input_gradient_s),
        weight_gradient_s=mean(costs.weight_gradient_s),
        links=costs.links,
    )


def _known(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


_Of = Callable[..., float | None]


def _backward(of: _Of, stage: int, recompute_s: float) -> float:
    """Seconds of a whole backward without recomputation, as far as it was seen."""
    plain = of(Kind.BACKWARD, stage)
    if plain is not None:
        return plain
    inside = of(Kind.BACKWARD, stage, True)
    if inside is not None:
        return max(inside - recompute_s, 0.0)
    parts = (of(Kind.INPUT_GRADIENT, stage), of(Kind.WEIGHT_GRADIENT, stage))
    return sum(part or 0.0 for part in parts)


def _half(of: _Of, kind: Kind, stage: int, recompute_s: float) -> float:
    """Seconds of a part of a split backward; half of the whole where none was seen."""
    plain = of(kind, stage)
    if plain is not None:
        return plain
    inside = of(kind, stage, True)
    if inside is not None:
        return max(inside - recompute_s, 0.0)
    return _backward(of, stage, recompute_s) / 2


def _medians(step: MeasuredStep) -> _Seconds:
    table = tabulate(step.schedule)
    flags = recomputes_inside(step.schedule, table).tolist()
    every = [action for own in step.schedule.actions for action in own]
    inside = dict(zip(every, flags, strict=True))
    found: dict[tuple[Kind, int, bool], list[float]] = {}
    for own in step.records:
        for action, start, end in own:
            key = (action.kind, action.stage, bool(inside.get(action, False)))
            found.setdefault(key, []).append(end - start)
    return {key: median(times) for key, times in found.items()}


def _links(step: MeasuredStep) -> tuple[Link, ...]:
    seen = transfer_s(step)
    return tuple(Link(latency_s=seen.get(s, 0.0)) for s in range(step.schedule.num_stages - 1))
