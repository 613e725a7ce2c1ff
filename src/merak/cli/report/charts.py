"""Charts of a run: figures over its steps, and the memory of every pp rank beside its forecast."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from markupsafe import Markup

from merak.cli.page.axis import Axis
from merak.cli.page.html import part
from merak.core.units import size
from merak.record.run import JobRecord, LogRecord, RankRecord

_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 428, 26, 216
_MOST_POINTS = 800

_PARTS = (
    ("parameters", "#4a7fd0"),
    ("gradients", "#8fd0a0"),
    ("optimizer", "#b79ad6"),
    ("activations and buffers", "#d79f3a"),
)
_USED = "#93a1b1"


def chart(
    logs: Sequence[LogRecord], name: str, title: str, form: Callable[[float], str]
) -> Markup | None:
    """Draw a figure over the steps of a run; None where it was never logged.

    Args:
        logs: of the run.
        name: of the figure.
        title: of the chart.
        form: formats a value.
    """
    points = [(log.step, log.figures[name]) for log in logs if name in log.figures]
    points = [(step, value) for step, value in points if math.isfinite(value)]
    if not points:
        return None
    shown = points[:: max(1, len(points) // _MOST_POINTS)]
    shown = shown if shown[-1] == points[-1] else [*shown, points[-1]]
    first, last = shown[0][0], shown[-1][0]
    across = Axis(first, last, _LEFT, _RIGHT)
    up = Axis.over([value for _, value in shown], _BOTTOM, _TOP, room=0.08)
    ends = ((first, "start"), (last, "end")) if last > first else ((first, "middle"),)
    return part(
        "chart",
        title=title,
        across=across,
        up=up,
        marks=[(y, form(value)) for value, y in up.ticks()],
        ends=[(across.place(step), anchor, f"step {step:,}") for step, anchor in ends],
        points=[
            (across.place(step), up.place(value), f"step {step:,}: {form(value)}")
            for step, value in shown
        ],
    )


def memory_bars(job: JobRecord, logs: Sequence[LogRecord]) -> Markup:
    """Draw the forecast memory of every pp rank, and under it what was measured.

    Args:
        job: as it was laid out.
        logs: of the run.
    """
    used = _used(job, logs)
    known = [own for own in used if own is not None]
    whole = max((*(own.peak_bytes for own in job.memory), *known, job.device_bytes or 0), default=0)
    forecasts = [*job.memory, *[None] * len(used)]
    what = "most that PyTorch has held" if job.on_gpu else "growth of the process"
    return part(
        "bars",
        entries=[*((colour, f"forecast: {name}") for name, colour in _PARTS), (_USED, what)],
        rows=[_bar(job, *own, whole) for own in zip(forecasts, used)] if whole else (),
        is_known=whole > 0,
        on_gpu=job.on_gpu,
    )


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


def _bar(
    job: JobRecord, forecast: RankRecord | None, used: int | None, whole: int
) -> dict[str, Any]:
    """What the bars of a pp rank show: widths in percent, and a line of text."""
    texts = [] if forecast is None else [f"forecast {size(forecast.peak_bytes)}"]
    measured = []
    if used:  # a process may even have shrunk
        measured = [(_width(used, whole), _USED, "")]
        texts.append(f"measured {size(used)}")
        if job.on_gpu and forecast is not None and forecast.peak_bytes:
            texts.append(f"{used / forecast.peak_bytes:.2f} of the forecast")
    if job.device_bytes:
        texts.append(f"of {size(job.device_bytes)}")
    return {
        "forecast": [] if forecast is None else _forecast_parts(forecast, whole),
        "measured": measured,
        "limit": _width(job.device_bytes, whole) if job.device_bytes else "",
        "texts": texts,
    }


def _forecast_parts(forecast: RankRecord, whole: int) -> list[tuple[str, str, str]]:
    """Parts of the peak; at another moment than the peak's own, activations may be more."""
    fixed = [forecast.parameters, forecast.gradients, forecast.optimizer]
    rest = max(forecast.peak_bytes - sum(fixed), 0)
    scale = forecast.peak_bytes / max(sum(fixed) + rest, 1)
    return [
        (_width(own * scale, whole), colour, f"{name}: {size(own)}")
        for own, (name, colour) in zip((*fixed, rest), _PARTS, strict=True)
    ]


def _width(num_bytes: float, whole: int) -> str:
    return f"{100 * num_bytes / whole:.2f}"
