"""Page of `merak plan`: the winner's pipeline and memory, and the frontier of time and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from merak.cli.page.axis import PAGE_WIDTH, round_values
from merak.cli.page.html import document, svg, table, write_document
from merak.core.units import seconds, size, step_time

if TYPE_CHECKING:
    from merak.cli.plan.planned import Planned
    from merak.cli.plan.request import PlanRequest
    from merak.plan.price.price import Price

_WIDTH, _LEFT, _ROW = 900, 90, 26
_LABEL = 130  # pixels of a bar on which its label has room
_HEIGHT = 360
_STYLE = "svg .on{fill:var(--paper);font-weight:600}.scroll .fit{min-width:600px}"


def write_page(path: Path, planned: Planned, request: PlanRequest) -> None:
    """Write the page of a search, which needs nothing from elsewhere.

    Args:
        path: of the page.
        planned: the outcome.
        request: what was asked.

    Raises:
        CommandError: the page cannot be written.
    """
    write_document(path, _page(planned, request))


def _page(planned: Planned, request: PlanRequest) -> str:
    from merak.plan.price.step import simulated_pipeline
    from merak.plan.search.explain import describe
    from merak.schedule.render.svg import fitting_width, render_svg
    from merak.schedule.simulator.timeline import simulated_timeline

    plans = planned.ranking.plans
    best = plans[0]
    simulation = simulated_pipeline(planned.workload, planned.cluster, best.candidate)
    title = f"{request.model} on {planned.cluster_name}"
    priced = (*plans, *planned.ranking.behind, *planned.ranking.fits_nowhere)
    timeline = replace(
        simulated_timeline(simulation),
        subtitle=f"{seconds(simulation.makespan)}, bubble {simulation.bubble_fraction:.1%}",
        unit=" s",
    )
    width = fitting_width([timeline], PAGE_WIDTH)
    pipeline = render_svg([timeline], width, themed=True)
    parts = [
        f"<h1>{escape(title)}: {escape(describe(best.candidate))}</h1>",
        f"<p>A step takes {seconds(best.step_s)} (± {best.uncertainty:.0%}).</p>",
        _table(plans),
        f'<h2>Pipeline</h2><div class="scroll">{pipeline}</div>',
        f'<h2>Memory by pp rank</h2><div class="scroll">{memory_svg(best)}</div>',
        "<h2>Time and memory</h2>",
        "<p>Every plan that was priced; the line joins those that no other beats in both. "
        "Red plans do not fit.</p>",
        f'<div class="scroll">{frontier_svg(priced)}</div>',
    ]
    return document(title, parts, _STYLE)


def _table(plans: Sequence[Price]) -> str:
    from merak.plan.search.explain import describe

    head = ("plan", "step", "compute", "bubble", "communication", "optimizer", "memory")
    rows = [
        (
            describe(own.candidate),
            seconds(own.step_s),
            seconds(own.compute_s),
            seconds(own.bubble_s),
            seconds(own.exposed_communication_s),
            seconds(own.optimizer_s),
            size(max(own.peak_memory_bytes)),
        )
        for own in plans
    ]
    return table(head, rows)


def memory_svg(price: Price) -> str:
    """Draw the peak memory of every pp rank beside its device's memory.

    Args:
        price: of the plan.
    """
    known = [most for most in price.device_bytes if most < float("inf")]
    whole = max((*price.peak_memory_bytes, *known))
    scale = (_WIDTH - _LEFT - 10) / whole
    parts = []
    for rank, (peak, most) in enumerate(
        zip(price.peak_memory_bytes, price.device_bytes, strict=True)
    ):
        y = rank * _ROW
        fill = "var(--good)" if peak <= most else "var(--bad)"
        parts.append(f'<text x="0" y="{y + 16}">pp rank {rank}</text>')
        parts.append(
            f'<rect x="{_LEFT}" y="{y + 3}" width="{peak * scale:.1f}" height="18" fill="{fill}"/>'
        )
        label = f"{size(peak)} of {size(int(most))}" if most < float("inf") else size(peak)
        is_inside = peak * scale > _LABEL
        x, kind = (_LEFT + 8, ' class="on"') if is_inside else (_LEFT + peak * scale + 8, "")
        parts.append(f'<text x="{x:.1f}" y="{y + 16}"{kind}>{label}</text>')
        if most < float("inf"):
            end = f"{_LEFT + most * scale:.1f}"
            parts.append(f'<line x1="{end}" x2="{end}" y1="{y}" y2="{y + _ROW}" class="mark"/>')
    height = _ROW * len(price.peak_memory_bytes)
    return svg(parts, _WIDTH, height, "peak memory of every pp rank")


def frontier_svg(prices: Sequence[Price]) -> str:
    """Draw plans by time and memory; those that no other beats in both are joined.

    Args:
        prices: of all plans to draw.
    """
    from merak.plan.search.explain import describe

    points = [(own.step_s, max(own.peak_memory_bytes), own) for own in prices]
    across = _Axis.over([point[0] for point in points], _LEFT, _WIDTH - 40)
    up = _Axis.over([float(point[1]) for point in points], _HEIGHT - 50, 16)
    joined: list[str] = []
    least = float("inf")
    parts = [*_grid(across, up)]
    for step_s, peak, own in sorted(points, key=lambda p: p[:2]):
        x, y = across.place(step_s), up.place(peak)
        if own.fits and peak < least:
            least = peak
            joined.append(f"{x:.1f},{y:.1f}")
        fill = "var(--blue)" if own.fits else "var(--bad)"
        label = escape(f"{describe(own.candidate)}: {seconds(step_s)}, {size(peak)}")
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{fill}"><title>{label}</title></circle>'
        )
    parts.append(f'<polyline points="{" ".join(joined)}" fill="none" stroke="var(--blue)"/>')
    return svg(parts, _WIDTH, _HEIGHT, "plans by time and memory")


@dataclass(frozen=True)
class _Axis:
    """An axis of a picture, from the least value to the greatest, with some room beside them."""

    least: float
    most: float
    start: float
    end: float

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float) -> _Axis:
        """The axis of some values, between two coordinates."""
        room = 0.05 * (max(values) - min(values)) or 0.05 * max(values)
        return cls(max(0.0, min(values) - room), max(values) + room, start, end)

    def place(self, value: float) -> float:
        """The coordinate of a value."""
        return self.start + (value - self.least) / (self.most - self.least) * self._length

    def ticks(self) -> Iterator[tuple[float, float]]:
        """Round values, and their coordinates."""
        for value in round_values(self.least, self.most):
            yield value, self.place(value)

    @property
    def _length(self) -> float:
        return self.end - self.start


def _grid(across: _Axis, up: _Axis) -> Iterator[str]:
    """Lines and labels of both axes."""
    for value, y in up.ticks():
        ends = f'x1="{across.start}" x2="{across.end}" y1="{y:.1f}" y2="{y:.1f}"'
        yield f'<line {ends} class="axis"/>'
        yield f'<text x="0" y="{y + 4:.1f}">{size(round(value))}</text>'
    for value, x in across.ticks():
        label = step_time(value)
        yield f'<text x="{x:.1f}" y="{up.start + 20}" text-anchor="middle">{label}</text>'
    middle = (across.start + across.end) / 2
    yield f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">time of a step</text>'
