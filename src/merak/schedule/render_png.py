"""Timelines as PNG, where matplotlib is installed."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from merak.core.errors import ScheduleError
from merak.schedule.ir import Kind
from merak.schedule.render_svg import CRITICAL_STROKE, FILLS, REDUCTION_FILL
from merak.schedule.timeline import Span, Timeline

_WIDTH_INCHES, _ROW_INCHES, _MARGIN_INCHES, _DPI = 14.0, 0.34, 1.15, 110
_INCHES_PER_LETTER = 0.085


def render_png(timelines: Sequence[Timeline], path: Path) -> None:
    """Draw timelines under one another, on one scale, into a PNG file.

    Args:
        timelines: what to draw.
        path: where to.

    Raises:
        ScheduleError: matplotlib is not installed.
    """
    figures = _matplotlib()
    heights = [_ROW_INCHES * len(t.rows) + _MARGIN_INCHES for t in timelines]
    figure = figures.Figure(figsize=(_WIDTH_INCHES, sum(heights)), layout="constrained")
    axes = figure.subplots(
        len(timelines), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    end_s = max(timeline.end_s for timeline in timelines) or 1.0
    for (axis,), timeline in zip(axes, timelines):
        _draw(axis, timeline, end_s)
    figure.savefig(path, dpi=_DPI, format="png")


def _matplotlib() -> ModuleType:
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ScheduleError(
            "A PNG picture needs matplotlib, which is not installed; install it, or write .svg or "
            ".html."
        ) from error


def _draw(axis: Any, timeline: Timeline, end_s: float) -> None:
    axis.set_title(f"{timeline.title}\n{timeline.subtitle}", loc="left", fontsize=9)
    axis.set_xlim(0, end_s)
    axis.set_ylim(len(timeline.rows) - 0.4, -0.6)
    axis.set_yticks(range(len(timeline.rows)), [f"rank {r}" for r in range(len(timeline.rows))])
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right", "left"]].set_visible(False)
    for rank, row in enumerate(timeline.rows):
        for span in row:
            _box(axis, span, rank, end_s)
        for span in timeline.reductions[rank] if timeline.reductions else ():
            length = span.end_s - span.start_s
            axis.barh(rank + 0.44, length, 0.12, span.start_s, color=REDUCTION_FILL)


def _box(axis: Any, span: Span, rank: int, end_s: float) -> None:
    assert span.kind is not None
    fills = FILLS[span.kind]
    shade = min(span.shade, len(fills) - 1)
    length = span.end_s - span.start_s
    axis.barh(
        rank,
        length,
        0.76,
        span.start_s,
        color=fills[shade],
        edgecolor=CRITICAL_STROKE if span.is_critical else "white",
        linewidth=1.4 if span.is_critical else 0.5,
        zorder=3 if span.is_critical else 2,
    )
    if length / end_s * _WIDTH_INCHES >= _INCHES_PER_LETTER * len(span.label):
        is_dark = shade > 0 and span.kind is not Kind.RECOMPUTE
        axis.text(
            span.start_s + length / 2,
            rank,
            span.label,
            ha="center",
            va="center",
            fontsize=7,
            color="white" if is_dark else "#1c2733",
            zorder=4,
        )
