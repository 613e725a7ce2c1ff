"""Page of `merak plan`: the winner's pipeline and memory, and the frontier of time and memory."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from merak.core.units import size
from merak.launch.errors import CommandError

if TYPE_CHECKING:
    from merak.cli.plan.planned import Planned
    from merak.cli.plan.request import PlanRequest
    from merak.plan.price.price import Price

_WIDTH, _LEFT, _ROW = 900, 90, 26
_HEIGHT = 360
_STYLE = (
    "body{margin:24px;background:#fff;font-family:system-ui,sans-serif;color:#1c2733}"
    "h1{font-size:20px}h2{font-size:16px;margin-top:28px}td,th{padding:2px 10px;text-align:right}"
    "table{border-collapse:collapse;font-size:13px}div{overflow-x:auto}"
    "td:first-child{text-align:left}svg{background:#fff}.fit{max-width:100%;height:auto}"
    "text{font-family:system-ui,sans-serif;font-size:11px;fill:#1c2733}"
    "@media (max-width:600px){body{margin:12px}}"
    "@media (prefers-color-scheme:dark){body{background:#12181f;color:#dbe3ec}}"
)


def write_page(path: Path, planned: Planned, request: PlanRequest) -> None:
    """Write the page of a search, which needs nothing from elsewhere.

    Args:
        path: of the page.
        planned: the outcome.
        request: what was asked.

    Raises:
        CommandError: the page cannot be written.
    """
    try:
        path.write_text(_page(planned, request), encoding="utf-8")
    except OSError as error:
        raise CommandError(f"the page cannot be written to {path}: {error.strerror}.") from error


def _page(planned: Planned, request: PlanRequest) -> str:
    from merak.plan.price.step import simulated_pipeline
    from merak.plan.search.explain import describe
    from merak.schedule.render.svg import render_svg
    from merak.schedule.simulator.timeline import simulated_timeline

    plans = planned.ranking.plans
    best = plans[0]
    simulation = simulated_pipeline(planned.workload, planned.cluster, best.candidate)
    title = escape(f"{request.model} on {planned.cluster_name}")
    parts = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{title}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{title}: {escape(describe(best.candidate))}</h1>",
        f"<p>A step takes {best.step_s:.4g} s (± {best.uncertainty:.0%}).</p>",
        _table(plans),
        f"<h2>Pipeline</h2><div>{render_svg([simulated_timeline(simulation)])}</div>",
        f"<h2>Memory by pp rank</h2>{memory_svg(best)}",
        f"<h2>Time and memory</h2>{frontier_svg((*plans, *planned.ranking.fits_nowhere))}",
        "</body></html>\n",
    ]
    return "\n".join(parts)


def _table(plans: Sequence[Price]) -> str:
    from merak.plan.search.explain import describe

    head = "<tr><th>plan</th><th>step</th><th>compute</th><th>bubble</th><th>communication</th>"
    rows = [
        f"<tr><td>{escape(describe(own.candidate))}</td><td>{own.step_s:.4g} s</td>"
        f"<td>{own.compute_s:.4g}</td><td>{own.bubble_s:.4g}</td>"
        f"<td>{own.exposed_communication_s:.4g}</td><td>{own.optimizer_s:.4g}</td>"
        f"<td>{size(max(own.peak_memory_bytes))}</td></tr>"
        for own in plans
    ]
    table = f"<table>{head}<th>optimizer</th><th>memory</th></tr>{''.join(rows)}</table>"
    return f"<div>{table}</div>"


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
        fill = "#8fd0a0" if peak <= most else "#c8102e"
        parts.append(f'<text x="0" y="{y + 16}">pp rank {rank}</text>')
        parts.append(
            f'<rect x="{_LEFT}" y="{y + 3}" width="{peak * scale:.1f}" height="18" fill="{fill}"/>'
        )
        parts.append(f'<text x="{_LEFT + peak * scale + 5:.1f}" y="{y + 16}">{size(peak)}</text>')
        if most < float("inf"):
            x = f"{_LEFT + most * scale:.1f}"
            parts.append(f'<line x1="{x}" x2="{x}" y1="{y}" y2="{y + _ROW}" stroke="#1c2733"/>')
    return _svg(parts, _ROW * len(price.peak_memory_bytes))


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
        fill = "#2f5fa8" if own.fits else "#c8102e"
        label = escape(f"{describe(own.candidate)}: {step_s:.4g} s, {size(peak)}")
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{fill}"><title>{label}</title></circle>'
        )
    line = " ".join("{:.1f},{:.1f}".format(*place(*point[:2])) for point in joined)
    bottom = _HEIGHT - 12
    parts += [
        f'<polyline points="{line}" fill="none" stroke="#2f5fa8"/>',
        f'<text x="0" y="16">{size(most)}</text><text x="0" y="{_HEIGHT - 42}">0</text>',
        f'<text x="{_LEFT}" y="{bottom}">0 s</text>',
        f'<text x="{_WIDTH - 90}" y="{bottom}">{slowest:.4g} s a step</text>',
    ]
    return _svg(parts, _HEIGHT)


def _svg(parts: Sequence[str], height: int) -> str:
    size = f'width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="fit" {size}>'
    return "\n".join((head, *parts, "</svg>"))
