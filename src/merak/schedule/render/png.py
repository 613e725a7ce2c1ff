"""Timelines as PNG: the picture of the SVG, in pixels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from merak.schedule.ir import Kind
from merak.schedule.render.svg import (
    BOTTOM,
    BOX,
    CRITICAL_STROKE,
    FILLS,
    LEFT,
    NAMES,
    REDUCTION_FILL,
    RIGHT,
    ROW,
    STRIP,
    TOP,
    fitting_width,
    ticks,
)
from merak.schedule.simulator.timeline import Span, Timeline

_SCALE = 2
"""Pixels of the PNG for one of the SVG, so that letters are sharp on today's screens."""

_INK, _SMALL_INK, _GRID = "#1c2733", "#5a6775", "#d8dee6"
_LEGEND = 26


def render_png(timelines: Sequence[Timeline], path: Path) -> None:
    """Draw timelines under one another, on one scale, into a PNG file.

    Args:
        timelines: what to draw.
        path: where to.

    Raises:
        OSError: the file cannot be written.
    """
    label_font = ImageFont.load_default(10)
    width = fitting_width(timelines, label_font.getlength)
    height = sum(_height(timeline) for timeline in timelines) + _LEGEND
    canvas = _Canvas(width, height)
    scale = (width - LEFT - RIGHT) / (max(timeline.end_s for timeline in timelines) or 1.0)
    top = 0
    for timeline in timelines:
        _draw(canvas, timeline, top, scale)
        top += _height(timeline)
    _draw_legend(canvas, timelines, top)
    canvas.image.save(path, format="PNG")


class _Canvas:
    """Canvas of a white picture, in the SVG's pixels.

    Args:
        width: of the picture.
        height: of the picture.
    """

    def __init__(self, width: int, height: int) -> None:
        self.width = width
        self.image = Image.new("RGB", (width * _SCALE, height * _SCALE), "white")
        self._draw = ImageDraw.Draw(self.image)

    def box(self, x: float, y: float, size: tuple[float, float], fill: str, outline: str) -> None:
        """A filled rectangle with an outline, which is thick where it is not white."""
        ends = (x, y, x + max(size[0], 0.5), y + size[1])
        corners = tuple(round(_SCALE * end) for end in ends)
        thickness = 1 if outline == "white" else 2 * _SCALE
        if corners[2] - corners[0] <= 2 * thickness:  # all of it would be outline
            outline, thickness = (fill if outline == "white" else outline), 1
        self._draw.rectangle(corners, fill, outline, thickness)

    def line(self, x: float, top: float, bottom: float) -> None:
        """A vertical line of the grid."""
        ends = (x * _SCALE, top * _SCALE, x * _SCALE, bottom * _SCALE)
        self._draw.line(ends, _GRID, _SCALE)

    def text(
        self, x: float, y: float, text: str, size: float, anchor: str = "ls", ink: str = _INK
    ) -> None:
        """A text; the anchor is PIL's."""
        font = ImageFont.load_default(size * _SCALE)
        self._draw.text((x * _SCALE, y * _SCALE), text, ink, font, anchor)


def _height(timeline: Timeline) -> int:
    return TOP + ROW * len(timeline.rows) + BOTTOM


def _draw(canvas: _Canvas, timeline: Timeline, top: int, scale: float) -> None:
    bottom = top + TOP + ROW * len(timeline.rows)
    canvas.text(LEFT, top + 26, timeline.title, 15)
    canvas.text(LEFT, top + 44, timeline.subtitle, 10, ink=_SMALL_INK)
    for tick in ticks((canvas.width - LEFT - RIGHT) / scale):
        canvas.line(LEFT + tick * scale, top + TOP - 6, bottom)
        canvas.text(LEFT + tick * scale, bottom + 14, f"{tick:g}", 10, "ms", _SMALL_INK)
    for rank, row in enumerate(timeline.rows):
        y = top + TOP + rank * ROW
        canvas.text(LEFT - 8, y + 15, f"rank {rank}", 11, "rs")
        # Critical boxes last, so that no neighbour covers their outline.
        for span in sorted(row, key=lambda span: span.is_critical):
            _draw_span(canvas, span, y, scale)
        for span in timeline.reductions[rank] if timeline.reductions else ():
            size = ((span.end_s - span.start_s) * scale, STRIP)
            canvas.box(LEFT + span.start_s * scale, y + BOX + 1, size, REDUCTION_FILL, "white")


def _draw_span(canvas: _Canvas, span: Span, y: int, scale: float) -> None:
    assert span.kind is not None
    x, width = LEFT + span.start_s * scale, (span.end_s - span.start_s) * scale
    shade = min(span.shade, len(FILLS[span.kind]) - 1)
    outline = CRITICAL_STROKE if span.is_critical else "white"
    canvas.box(x, y, (width, BOX), FILLS[span.kind][shade], outline)
    if width >= ImageFont.load_default(10).getlength(span.label) + 1:
        is_dark = shade > 0 and span.kind is not Kind.RECOMPUTE
        ink = "white" if is_dark else _INK
        canvas.text(x + width / 2, y + BOX / 2, span.label, 10, "mm", ink)


def _draw_legend(canvas: _Canvas, timelines: Sequence[Timeline], y: int) -> None:
    spans = [span for timeline in timelines for row in timeline.rows for span in row]
    entries = [
        (FILLS[kind][0], "white", f"{kind.value} {NAMES[kind]}")
        for kind in Kind
        if any(span.kind is kind for span in spans)
    ]
    if any(any(timeline.reductions) for timeline in timelines):
        entries.append((REDUCTION_FILL, "white", "gradient reduction"))
    if any(span.is_critical for span in spans):
        entries.append(("white", CRITICAL_STROKE, "critical path"))
    x = float(LEFT)
    for fill, outline, text in entries:
        canvas.box(x, y, (14, 12), fill, outline)
        canvas.text(x + 19, y + 10, text, 10, ink=_SMALL_INK)
        x += 34 + ImageFont.load_default(10).getlength(text)
