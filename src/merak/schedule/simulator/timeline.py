"""Timelines: what the pictures show, be it simulated or measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from merak.core.units import counted
from merak.schedule.ir import Action, Kind, Schedule
from merak.schedule.simulator.memory import recomputes_inside
from merak.schedule.simulator.simulate import Simulation


@dataclass(frozen=True, slots=True)
class Span:
    """One box of a picture."""

    label: str
    # None for a reduction.
    kind: Kind | None
    start_s: float
    end_s: float
    # Which of its rank's stages the action is on, from 0: pictures shade later ones darker.
    shade: int = 0
    is_critical: bool = False
    # What else to say about it where one points at it.
    detail: str = ""
    # Its colour, where it is not that of its kind.
    fill: str = ""


@dataclass(frozen=True, slots=True)
class Timeline:
    """The rows of one picture, a row per rank."""

    title: str
    subtitle: str
    rows: tuple[tuple[Span, ...], ...]
    # Reductions, which run beside the actions: a thinner row under each rank's; empty if unknown.
    reductions: tuple[tuple[Span, ...], ...]
    end_s: float
    # Idle times behind the actions of each rank; empty if nobody asks why it is idle.
    idle: tuple[tuple[Span, ...], ...] = ()
    # Behind the numbers of its axis, such as " s".
    unit: str = ""


def short_action_s(timelines: Sequence[Timeline]) -> float | None:
    """Seconds of a short action: nine in ten take as long or longer; None if there are none.

    A picture has room for the label of such a one. Of a measured iteration, a few may take no time.
    """
    lengths = sorted(
        span.end_s - span.start_s
        for timeline in timelines
        for row in timeline.rows
        for span in row
        if span.end_s > span.start_s
    )
    return lengths[len(lengths) // 10] if lengths else None


def longest_label(timelines: Sequence[Timeline]) -> str:
    """The longest label of an action, such as F10."""
    return max((s.label for t in timelines for row in t.rows for s in row), key=len, default="")


def simulated_timeline(simulation: Simulation) -> Timeline:
    """The timeline of a simulation."""
    schedule, table = simulation.schedule, simulation.table
    critical = set(simulation.critical_path)
    inside = recomputes_inside(schedule, table)
    stages = [schedule.stages_of(rank) for rank in range(schedule.num_ranks)]
    rows = []
    for rank, actions in enumerate(schedule.actions):
        row = []
        labels = schedule.labels(rank)
        for place, action in enumerate(actions):
            index = table.starts[rank] + place
            recomputes = ", recomputes inside" if inside[index] else ""
            row.append(
                Span(
                    label=labels[place],
                    kind=action.kind,
                    start_s=float(simulation.start[index]),
                    end_s=float(simulation.end[index]),
                    shade=stages[rank].index(action.stage),
                    is_critical=index in critical,
                    detail=f"stage {action.stage}, microbatch {action.microbatch}{recomputes}",
                )
            )
        rows.append(tuple(row))
    peak = max(simulation.peak_in_flight)
    return Timeline(
        title=schedule.name,
        subtitle=(
            f"{counted(schedule.num_ranks, 'rank')}, {counted(schedule.num_stages, 'stage')}, "
            f"{counted(schedule.num_microbatches, 'microbatch')}: "
            f"makespan {simulation.makespan:g}, "
            f"bubble {100 * simulation.bubble_fraction:.1f} % of all time, "
            f"at most {peak} in flight"
        ),
        rows=tuple(rows),
        reductions=_reduction_rows(simulation),
        end_s=simulation.makespan,
    )


def measured_timeline(
    schedule: Schedule, records: Sequence[Sequence[tuple[Action, float, float]]]
) -> Timeline:
    """The timeline of an iteration that an engine has run, to be drawn over the simulated one.

    Args:
        schedule: what was run.
        records: per rank, actions with their start and end, s, on one clock.
    """
    begin = min((start for own in records for _, start, _ in own), default=0.0)
    end = max((end for own in records for _, _, end in own), default=0.0)
    rows = []
    for rank, own in enumerate(records):
        stages = schedule.stages_of(rank)
        several = schedule.has_several_stages_per_rank
        rows.append(
            tuple(
                Span(
                    label=str(action) if several else action.short,
                    kind=action.kind,
                    start_s=start - begin,
                    end_s=stop - begin,
                    shade=stages.index(action.stage),
                    detail=f"stage {action.stage}, microbatch {action.microbatch}",
                )
                for action, start, stop in own
            )
        )
    busy = sum(stop - start for own in records for _, start, stop in own)
    total = (end - begin) * len(records)
    bubble = 1 - busy / total if total else 0.0
    return Timeline(
        title=f"{schedule.name}, measured",
        subtitle=f"makespan {end - begin:g}, bubble {100 * bubble:.1f} % of all time",
        rows=tuple(rows),
        reductions=(),
        end_s=end - begin,
    )


def _reduction_rows(simulation: Simulation) -> tuple[tuple[Span, ...], ...]:
    return tuple(
        tuple(
            Span(f"Σ{r.stage}", None, r.start, r.end, detail=f"reduction of stage {r.stage}")
            for r in simulation.reductions
            if rank in r.ranks
        )
        for rank in range(simulation.schedule.num_ranks)
    )
