"""Timelines of a step: as measured, with idle times and critical path, over the simulated one."""

from __future__ import annotations

from dataclasses import replace

from markupsafe import Markup

from merak.cli.page.axis import PAGE_WIDTH
from merak.cli.page.html import part
from merak.cli.report.advice import milliseconds, percent
from merak.cli.report.study import StepStudy
from merak.record.idle import MEANINGS, Cause, Idle
from merak.schedule.render.svg import fitting_width, render_svg
from merak.schedule.simulator.timeline import (
    Span,
    Timeline,
    measured_timeline,
    simulated_timeline,
)

_COLOURS = {
    Cause.FILL: ("#d9d3c3", "#7d7150"),
    Cause.DRAIN: ("#c5cdd6", "#4a617c"),
    Cause.WAIT: ("#f3c9a5", "#b0682c"),
    Cause.TRANSFER: ("#f0a3ad", "#b0455c"),
    Cause.HOST: ("#e8e29a", "#a39a2b"),
}
"""Colours of idle times by their cause: on paper, and in dark mode."""


def variables() -> tuple[str, str]:
    """CSS variables of the colours: on paper, and in dark mode."""
    on_paper, dark = (
        ";".join(f"--idle-{cause.name}:{both[mode]}" for cause, both in _COLOURS.items())
        for mode in (0, 1)
    )
    return on_paper, dark


FILLS = {cause: f"var(--idle-{cause.name})" for cause in _COLOURS}
"""Fills of idle times by their cause, in a page with `variables`."""

_MOST_SPANS = 6000
"""Boxes of a picture that browsers draw at once; a longer step is shown from its beginning."""


def drawn_step(study: StepStudy, text: str) -> Markup:
    """Draw the measured step over the simulated one, on one scale, with a table of idle times.

    Args:
        study: of the step.
        text: on the step.
    """
    measured = replace(_measured(study), unit=" s")
    simulated = replace(
        simulated_timeline(study.simulated),
        unit=" s",
        title=f"{study.step.schedule.name}, simulated",
        subtitle="the same order with the median times of each stage, and no time for transfers: "
        f"{milliseconds(study.simulated.makespan)}, bubble "
        f"{percent(study.simulated.bubble_fraction)}",
    )
    note = ""
    number = sum(len(row) for row in measured.rows)
    if number > _MOST_SPANS:
        until = measured.end_s * _MOST_SPANS / number
        measured, simulated = _until(measured, until), _until(simulated, until)
        note = f"The first {milliseconds(until)} of the step."
    width = fitting_width([measured, simulated], PAGE_WIDTH)
    return part(
        "step",
        text=text,
        note=note,
        picture=render_svg([measured, simulated], width, themed=True),
        idle=[(fill, f"idle, {cause.value}") for cause, fill in FILLS.items()],
        head=("", "computes", *(cause.value for cause in Cause), "longest wait"),
        rows=[_row(study, rank) for rank in range(study.num_ranks)],
        meanings=[(cause.value, meaning) for cause, meaning in MEANINGS.items()],
    )


def _row(study: StepStudy, rank: int) -> tuple[str, ...]:
    """How much of the step a pp rank computes, and why it is idle."""
    shares = study.shares(rank)
    cells = [percent(shares[cause]) for cause in Cause]
    return (f"pp rank {rank}", percent(study.busy(rank)), *cells, _longest(study, rank))


def _longest(study: StepStudy, rank: int) -> str:
    own = [idle for idle in study.idle if idle.rank == rank and idle.awaited is not None]
    if not own:
        return ""
    longest = max(own, key=lambda idle: idle.seconds)
    return f"{milliseconds(longest.seconds)} for {_awaited(study, longest)}"


def _awaited(study: StepStudy, idle: Idle) -> str:
    assert idle.awaited is not None
    return f"{study.step.schedule.label(idle.awaited)} of pp rank {idle.on}"


def _measured(study: StepStudy) -> Timeline:
    step, critical = study.step, set(study.critical)
    plain = measured_timeline(step.schedule, step.records)
    # Its beginning is the first action's; idle times count from the step's.
    ahead = min(own[0][1] for own in step.records) - step.begin_s
    rows = tuple(
        tuple(
            replace(
                span,
                start_s=span.start_s + ahead,
                end_s=span.end_s + ahead,
                is_critical=action in critical,
            )
            for span, (action, _, _) in zip(row, records, strict=True)
        )
        for row, records in zip(plain.rows, step.records, strict=True)
    )
    idle = tuple(
        tuple(_idle_span(study, own) for own in study.idle if own.rank == rank)
        for rank in range(study.num_ranks)
    )
    return Timeline(
        title=f"{step.schedule.name}, measured",
        subtitle=f"step {step.step + 1}: {milliseconds(step.pipeline_s)}, bubble "
        f"{percent(study.bubble)}",
        rows=rows,
        reductions=(),
        end_s=step.pipeline_s,
        idle=idle,
    )


def _idle_span(study: StepStudy, idle: Idle) -> Span:
    begin = study.step.begin_s
    waits = f"for {_awaited(study, idle)}" if idle.awaited is not None else MEANINGS[idle.cause]
    return Span(
        label=f"idle, {idle.cause.value}",
        kind=None,
        start_s=idle.start_s - begin,
        end_s=idle.end_s - begin,
        detail=waits,
        fill=FILLS[idle.cause],
    )


def _until(timeline: Timeline, end_s: float) -> Timeline:
    """The beginning of a timeline."""

    def cut(rows: tuple[tuple[Span, ...], ...]) -> tuple[tuple[Span, ...], ...]:
        return tuple(
            tuple(
                replace(span, end_s=min(span.end_s, end_s)) for span in row if span.start_s < end_s
            )
            for row in rows
        )

    return replace(
        timeline,
        rows=cut(timeline.rows),
        reductions=cut(timeline.reductions),
        idle=cut(timeline.idle),
        end_s=min(timeline.end_s, end_s),
    )
