"""Charts of a run: figures over its steps, and the memory of every pp rank beside its forecast."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from merak.cli.page.axis import round_values
from merak.cli.page.html import svg
from merak.cli.report.picture import legend_of
from merak.core.units import size
from merak.record.run import JobRecord, LogRecord, RankRecord

_WIDTH, _HEIGHT = 440, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 26, 24
_MOST_POINTS = 800

STYLE = """
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,380px),1fr));gap:16px}
.bars{display:grid;grid-template-columns:max-content 1fr;gap:4px 12px;font-size:12.5px;
align-items:center;max-width:900px}
.bars .track{position:relative;height:17px;display:flex;min-width:0}
.bars .track i{height:100%}.bars .of{position:absolute;top:-2px;bottom:-2px;width:2px;
background:var(--ink)}
.bars .text{grid-column:2;color:var(--quiet);margin-bottom:8px}
"""

_PARTS = (
    ("parameters", "#4a7fd0"),
    ("gradients", "#8fd0a0"),
    ("optimizer", "#b79ad6"),
    ("activations and buffers", "#d79f3a"),
)
_USED = "#93a1b1"


def chart(logs: Sequence[LogRecord], name: str, title: str, form: Callable[[float], str]) -> str:
    """Draw a figure over the steps of a run; nothing where it was never logged.

    Args:
        logs: of the run.
        name: of the figure.
        title: of the chart.
        form: formats a value.
    """
    points = [(log.step, log.figures[name]) for log in logs if name in log.figures]
    points = [(step, value) for step, value in points if math.isfinite(value)]
    if not points:
        return ""
    shown = points[:: max(1, len(points) // _MOST_POINTS)]
    shown = shown if shown[-1] == points[-1] else [*shown, points[-1]]
    parts = [
        f'<text x="{_LEFT}" y="15" style="font-size:13px;font-weight:600">{escape(title)}</text>'
    ]
    parts += _drawn(shown, form)
    return f"<div>{svg(parts, _WIDTH, _HEIGHT, title)}</div>"


def _drawn(points: Sequence[tuple[int, float]], form: Callable[[float], str]) -> list[str]:
    low, high = min(value for _, value in points), max(value for _, value in points)
    room = (high - low) * 0.08 or abs(high) * 0.08 or 1.0
    low, high = (max(0.0, low - room) if low >= 0 else low - room), high + room
    first, last = points[0][0], points[-1][0]

    def place(step: float, value: float) -> tuple[float, float]:
        x = (step - first) / (last - first) if last > first else 0.5
        y = (value - low) / (high - low)
        return (
            _LEFT + x * (_WIDTH - _LEFT - _RIGHT),
            _TOP + (1 - y) * (_HEIGHT - _TOP - _BOTTOM),
        )

    parts = []
    for value in round_values(low, high):
        _, y = place(first, value)
        parts.append(
            f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="faint" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">'
            f"{escape(form(value))}</text>"
        )
    ends = ((first, "start"), (last, "end")) if last > first else ((first, "middle"),)
    for step, anchor in ends:
        x, _ = place(step, low)
        parts.append(
            f'<text class="faint" x="{x:.1f}" y="{_HEIGHT - 6}" text-anchor="{anchor}">'
            f"step {step:,}</text>"
        )
    line = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in points)
    parts.append(
        f'<polyline points="{line}" fill="none" stroke="var(--accent)" stroke-width="1.8"/>'
    )
    for step, value in points if len(points) <= 60 else points[-1:]:
        x, y = place(step, value)
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="var(--accent)">'
            f"<title>step {step:,}: {escape(form(value))}</title></circle>"
        )
    return parts


def memory_bars(job: JobRecord, logs: Sequence[LogRecord]) -> str:
    """Draw the forecast memory of every pp rank, and under it what was measured.

    Args:
        job: as it was laid out.
        logs: of the run.
    """
    used = _used(job, logs)
    known = [own for own in used if own is not None]
    whole = max((*(own.peak_bytes for own in job.memory), *known, job.device_bytes or 0), default=0)
    if not whole:
        return '<p class="quiet">The memory of this job was neither forecast nor measured.</p>'
    rows = []
    for rank in range(job.degrees["pp"]):
        own = job.memory[rank] if rank < len(job.memory) else None
        rows.append(_rank_bars(job, rank, own, used[rank] if rank < len(used) else None, whole))
    what = "most that PyTorch has held" if job.on_gpu else "growth of the process"
    legend = legend_of([*((colour, f"forecast: {name}") for name, colour in _PARTS), (_USED, what)])
    return legend + f'<div class="bars">{"".join(rows)}</div>' + _memory_note(job)


def _used(job: JobRecord, logs: Sequence[LogRecord]) -> tuple[int | None, ...]:
    """Measured bytes of every pp rank; of a CPU's process, what it has grown by."""
    most: dict[int, int] = {}
    for log in logs:
        for rank, own in enumerate(log.memory_bytes):
            if own is not None:
                most[rank] = max(most.get(rank, 0), own)
    ranks = range(job.degrees["pp"])
    if job.on_gpu:
        return tuple(most.get(rank) for rank in ranks)
    base = dict(enumerate(job.base_bytes))
    return tuple(_grown(most.get(rank), base.get(rank)) for rank in ranks)


def _grown(now: int | None, base: int | None) -> int | None:
    return None if now is None or base is None else max(now - base, 0)


def _rank_bars(
    job: JobRecord, rank: int, forecast: RankRecord | None, used: int | None, whole: int
) -> str:
    limit = ""
    if job.device_bytes:
        place = f"left:calc({100 * job.device_bytes / whole:.2f}% - 2px)"
        limit = f'<span class="of" style="{place}"></span>'
    parts = "" if forecast is None else _forecast_parts(forecast, whole)
    texts = [] if forecast is None else [f"forecast {size(forecast.peak_bytes)}"]
    measured = ""
    if used:  # a process may even have shrunk
        measured = f'<i style="width:{100 * used / whole:.2f}%;background:{_USED}"></i>'
        texts.append(f"measured {size(used)}")
        if job.on_gpu and forecast is not None and forecast.peak_bytes:
            texts.append(f"{used / forecast.peak_bytes:.2f} of the forecast")
    if job.device_bytes:
        texts.append(f"of {size(job.device_bytes)}")
    return (
        f'<span>pp rank {rank}</span><div class="track">{parts}{limit}</div>'
        f'<span></span><div class="track">{measured}{limit}</div>'
        f'<div class="text">{escape(", ".join(texts))}</div>'
    )


def _forecast_parts(forecast: RankRecord, whole: int) -> str:
    """Parts of the peak; at another moment than the peak's own, activations may be more."""
    fixed = [forecast.parameters, forecast.gradients, forecast.optimizer]
    rest = max(forecast.peak_bytes - sum(fixed), 0)
    scale = forecast.peak_bytes / max(sum(fixed) + rest, 1)
    parts = zip((*fixed, rest), _PARTS, strict=True)
    return "".join(
        f'<i style="width:{100 * own * scale / whole:.2f}%;background:{colour}" '
        f'title="{name}: {size(own)}"></i>'
        for own, (name, colour) in parts
    )


def _memory_note(job: JobRecord) -> str:
    if job.on_gpu:
        return ""
    return (
        '<p class="quiet">On the CPU, nothing counts the tensors alone: the lower bars are what '
        "the process of a rank has grown by since it had no weights, with Python's objects, "
        "libraries that were loaded since, and memory that the allocator keeps.</p>"
    )
