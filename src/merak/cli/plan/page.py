"""Page of `merak plan`: the winner's pipeline and memory, and the frontier of time and memory."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from merak.cli.page.html import document, svg, table, write_document
from merak.core.units import size

if TYPE_CHECKING:
    from merak.cli.plan.planned import Planned
    from merak.cli.plan.request import PlanRequest
    from merak.plan.price.price import Price

_WIDTH, _LEFT, _ROW = 900, 90, 26
_HEIGHT = 360


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
    from merak.schedule.render.svg import render_svg
    from merak.schedule.simulator.timeline import simulated_timeline

    plans = planned.ranking.plans
    best = plans[0]
    simulation = simulated_pipeline(planned.workload, planned.cluster, best.candidate)
    title = f"{request.model} on {planned.cluster_name}"
    pipeline = render_svg([simulated_timeline(simulation)], themed=True)
    parts = [
        f"<h1>{escape(title)}: {escape(describe(best.candidate))}</h1>",
        f"<p>A step takes {best.step_s:.4g} s (± {best.uncertainty:.0%}).</p>",
        _table(plans),
        f'<h2>Pipeline</h2><div class="scroll">{pipeline}</div>',
        f"<h2>Memory by pp rank</h2>{memory_svg(best)}",
        f"<h2>Time and memory</h2>{frontier_svg((*plans, *planned.ranking.fits_nowhere))}",
    ]
    return document(title, parts)


def _table(plans: Sequence[Price]) -> str:
    from merak.plan.search.explain import describe

    head = ("plan", "step", "compute", "bubble", "communication", "optimizer", "memory")
    rows = [
        (
            describe(own.candidate),
            f"{own.step_s:.4g} s",
            f"{own.compute_s:.4g}",
            f"{own.bubble_s:.4g}",
            f"{own.exposed_communication_s:.4g}",
            f"{own.optimizer_s:.4g}",
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
    scale = (_WIDTH - _LEFT - 100) / whole
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
        parts.append(f'<text x="{_LEFT + peak * scale + 5:.1f}" y="{y + 16}">{size(peak)}</text>')
        if most < float("inf"):
            x = f"{_LEFT + most * scale:.1f}"
            parts.append(f'<line x1="{x}" x2="{x}" y1="{y}" y2="{y + _ROW}" class="mark"/>')
    height = _ROW * len(price.peak_memory_bytes)
    return svg(parts, _WIDTH, height, "peak memory of every pp rank")


def frontier_svg(prices: Sequence[Price]) -> str:
    """Draw plans by time and memory; those that no other beats in both are joined.

    Args:
        prices: of all plans to draw.
    """
    from merak.plan.search.explain import describe

    points = [(own.step_s, max(own.peak_memory_bytes), own) for own in prices]
    slowest, most = max(p[0] for p in points), max(p[1] for p in points)

    def place(step_s: float, peak: float) -> tuple[float, float]:
        width, height = _WIDTH - _LEFT - 40, _HEIGHT - 50
        return _LEFT + step_s / slowest * width, 10 + (1 - peak / most) * height

    joined: list[tuple[float, float, Price]] = []
    parts = []
    for step_s, peak, own in sorted(points, key=lambda p: p[:2]):
        x, y = place(step_s, peak)
        if all(peak < other for _, other, _ in joined):
            joined.append((step_s, peak, own))
        fill = "var(--blue)" if own.fits else "var(--bad)"
        label = escape(f"{describe(own.candidate)}: {step_s:.4g} s, {size(peak)}")
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{fill}"><title>{label}</title></circle>'
        )
    line = " ".join("{:.1f},{:.1f}".format(*place(*point[:2])) for point in joined)
    bottom = _HEIGHT - 12
    parts += [
        f'<polyline points="{line}" fill="none" stroke="var(--blue)"/>',
        f'<text x="0" y="16">{size(most)}</text><text x="0" y="{_HEIGHT - 42}">0</text>',
        f'<text x="{_LEFT}" y="{bottom}">0 s</text>',
        f'<text x="{_WIDTH - 90}" y="{bottom}">{slowest:.4g} s a step</text>',
    ]
    return svg(parts, _WIDTH, _HEIGHT, "plans by time and memory")
