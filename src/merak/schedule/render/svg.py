"""Timelines as self-contained SVG and HTML: hover for times, the critical path outlined."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from merak.schedule.ir import Kind
from merak.schedule.simulator.timeline import Span, Timeline, longest_label, short_action_s

FILLS = {
    Kind.FORWARD: ("#8ab4f0", "#4a7fd0", "#2f5fa8", "#234a85"),
    Kind.RECOMPUTE: ("#cfdbea", "#aebfd6", "#93a8c4", "#7a91b0"),
    Kind.BACKWARD: ("#8fd0a0", "#4fa868", "#35834c", "#27663a"),
    Kind.INPUT_GRADIENT: ("#8fd0a0", "#4fa868", "#35834c", "#27663a"),
    Kind.WEIGHT_GRADIENT: ("#f0c674", "#d79f3a", "#b58026", "#90651c"),
}
"""Colours of the kinds, from a rank's first stage to its later ones."""

REDUCTION_FILL = "#b79ad6"
CRITICAL_STROKE = "#c8102e"

NAMES = {
    Kind.FORWARD: "forward",
    Kind.RECOMPUTE: "recompute",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRADIENT: "input gradient",
    Kind.WEIGHT_GRADIENT: "weight gradient",
}
LEFT, RIGHT, TOP, ROW, BOX, STRIP = 64, 16, 64, 30, 22, 5
BOTTOM = 34
WIDTH, MOST_WIDTH = 1400, 12000
"""Pixels of a picture: usually, and where many microbatches need room for their labels."""
_LABEL_WIDTH = 6.4
_STYLE = (
    "text{font-family:system-ui,sans-serif;fill:#1c2733}"
    ".box{stroke:#fff;stroke-width:.6}.box:hover{stroke:#000;stroke-width:1.6}"
    f".critical{{stroke:{CRITICAL_STROKE};stroke-width:2}}"
    ".label{font-size:10px;text-anchor:middle;pointer-events:none}"
    ".dark{fill:#fff}.grid{stroke:#d8dee6;stroke-width:1}.small{font-size:10px;fill:#5a6775}"
    ".title{font-size:15px;font-weight:600}.rank{font-size:11px;text-anchor:end}"
)


_THEMED = (
    ("text{", "svg text{"),
    ("#1c2733", "var(--ink)"),
    ("#5a6775", "var(--quiet)"),
    ("#d8dee6", "var(--line)"),
    ("stroke:#fff", "stroke:var(--paper)"),
    ("stroke:#000", "stroke:var(--ink)"),
    (".label{", ".label{fill:#1c2733;"),  # on boxes that are as pale in dark mode
)
"""Rules of the style → those of a page with variables for its colours."""


def render_svg(
    timelines: Sequence[Timeline], width: int | None = None, *, themed: bool = False
) -> str:
    """Draw timelines under one another, on one scale, as an SVG document.

    Args:
        timelines: what to draw, such as a measured timeline and the simulated one.
        width: of the picture, in pixels; None takes as many as its labels need, within reason.
        themed: whether it is a part of a page that has variables for its colours (--ink, --quiet,
            --line, --paper), and no background of its own.
    """
    end_s = max(timeline.end_s for timeline in timelines) or 1.0
    if width is None:
        width = fitting_width(timelines)
    scale = (width - LEFT - RIGHT) / end_s
    parts, top = [], 0
    for timeline in timelines:
        parts.extend(_timeline(timeline, top, scale, width))
        top += _height(timeline)
    parts.append(_legend(timelines, top))
    height = top + 26
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">'
    )
    style, background = _STYLE, f'<rect width="{width}" height="{height}" fill="#fff"/>'
    if themed:
        background = ""
        for plain, own in _THEMED:
            style = style.replace(plain, own)
    return "\n".join((head, f"<style>{style}</style>", background, *parts, "</svg>")) + "\n"


def fitting_width(timelines: Sequence[Timeline], least: int = WIDTH) -> int:
    """Pixels of a picture in which every action has room for its label, within reason.

    Args:
        timelines: what is drawn.
        least: pixels that it has where labels need fewer.
    """
    end_s, action_s = max(timeline.end_s for timeline in timelines), short_action_s(timelines)
    if action_s is None:
        return least
    needed = (_LABEL_WIDTH * len(longest_label(timelines)) + 2) / action_s * end_s
    return min(max(least, math.ceil(needed) + LEFT + RIGHT), MOST_WIDTH)


def render_html(timelines: Sequence[Timeline], width: int | None = None) -> str:
    """Draw timelines as a page of its own, without anything from elsewhere."""
    title = escape(", ".join(timeline.title for timeline in timelines))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>body{{margin:16px;background:#fff}}</style></head>\n<body>\n"
        f"{render_svg(timelines, width)}</body></html>\n"
    )


def _height(timeline: Timeline) -> int:
    return TOP + ROW * len(timeline.rows) + BOTTOM


def _timeline(timeline: Timeline, top: int, scale: float, width: int) -> list[str]:
    bottom = top + TOP + ROW * len(timeline.rows)
    parts = [
        f'<text class="title" x="{LEFT}" y="{top + 26}">{escape(timeline.title)}</text>',
        f'<text class="small" x="{LEFT}" y="{top + 44}">{escape(timeline.subtitle)}</text>',
    ]
    for tick in ticks((width - LEFT - RIGHT) / scale):
        x = f"{LEFT + tick * scale:.2f}"
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{top + TOP - 6}" y2="{bottom}"/>')
        parts.append(
            f'<text class="small" x="{x}" y="{bottom + 14}" text-anchor="middle">'
            f"{tick:g}{timeline.unit}</text>"
        )
    for rank, row in enumerate(timeline.rows):
        y = top + TOP + rank * ROW
        parts.append(f'<text class="rank" x="{LEFT - 8}" y="{y + 15}">rank {rank}</text>')
        for span in timeline.idle[rank] if timeline.idle else ():
            parts.extend(_box(span, y, scale, height=BOX))
        # Critical boxes last, so that no neighbour covers their outline.
        for span in sorted(row, key=lambda span: span.is_critical):
            parts.extend(_box(span, y, scale))
        for span in timeline.reductions[rank] if timeline.reductions else ():
            parts.extend(_box(span, y + BOX + 1, scale))
    return parts


def _box(span: Span, y: int, scale: float, height: int | None = None) -> list[str]:
    x, width = LEFT + span.start_s * scale, (span.end_s - span.start_s) * scale
    name = "" if span.kind is None else f"{NAMES[span.kind]}, "
    critical = ", on the critical path" if span.is_critical else ""
    hover = (
        f"{span.label}: {name}{span.detail}{critical}\n{span.start_s:g} to {span.end_s:g}, "
        f"{span.end_s - span.start_s:g} long"
    )
    if height is None:
        height = STRIP if span.kind is None else BOX
    fills = (REDUCTION_FILL,) if span.kind is None else FILLS[span.kind]
    fills = (span.fill,) if span.fill else fills
    shade = min(span.shade, len(fills) - 1)
    kind = "box critical" if span.is_critical else "box"
    parts = [
        f'<rect class="{kind}" x="{x:.2f}" y="{y}" width="{max(width, 0.5):.2f}" '
        f'height="{height}" rx="2" fill="{fills[shade]}"><title>{escape(hover)}</title></rect>'
    ]
    if span.kind is not None and width >= _LABEL_WIDTH * len(span.label) + 2:
        dark = " dark" if shade > 0 and span.kind is not Kind.RECOMPUTE else ""
        parts.append(
            f'<text class="label{dark}" x="{x + width / 2:.2f}" y="{y + 15}">{span.label}</text>'
        )
    return parts


def ticks(end_s: float) -> list[float]:
    """Around ten round times."""
    step = 10.0 ** math.floor(math.log10(end_s / 10))
    step *= next(m for m in (1, 2, 5, 10) if end_s / (step * m) <= 12)
    return [number * step for number in range(math.floor(end_s / step + 1e-9) + 1)]


def _legend(timelines: Sequence[Timeline], y: int) -> str:
    spans = [span for timeline in timelines for row in timeline.rows for span in row]
    kinds = [kind for kind in Kind if any(span.kind is kind for span in spans)]
    entries = [(FILLS[kind][0], "none", f"{kind.value} {NAMES[kind]}") for kind in kinds]
    if any(any(timeline.reductions) for timeline in timelines):
        entries.append((REDUCTION_FILL, "none", "gradient reduction"))
    if any(span.is_critical for span in spans):
        entries.append(("#fff", CRITICAL_STROKE, "critical path"))
    parts, x = [], float(LEFT)
    for fill, stroke, text in entries:
        parts.append(
            f'<rect x="{x:.0f}" y="{y}" width="14" height="12" rx="2" fill="{fill}" '
            f'stroke="{stroke}" stroke-width="2"/>'
            f'<text class="small" x="{x + 19:.0f}" y="{y + 10}">{escape(text)}</text>'
        )
        x += 34 + 5.6 * len(text)
    return "".join(parts)
