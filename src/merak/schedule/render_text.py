"""Timelines for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from merak.schedule.ir import Kind
from merak.schedule.timeline import Span, Timeline

_COLOURS = {
    Kind.FORWARD: "44;97",
    Kind.RECOMPUTE: "46;30",
    Kind.BACKWARD: "42;30",
    Kind.INPUT_GRADIENT: "42;30",
    Kind.WEIGHT_GRADIENT: "43;30",
}
_CRITICAL = "1;4"
_MOST_COLUMNS_PER_ACTION = 6


def render_text(timeline: Timeline, num_columns: int = 120, colour: bool = False) -> str:
    """Draw a timeline in columns of text, a line per rank.

    A box shows its action, or its kind alone where that is all that fits; idle time is dots.

    Args:
        timeline: what to draw.
        num_columns: most columns of a line.
        colour: mark kinds by colour and the critical path by underlining, with escape sequences.
    """
    return render_texts([timeline], num_columns, colour)


def render_texts(
    timelines: Sequence[Timeline], num_columns: int = 120, colour: bool = False
) -> str:
    """Draw timelines under one another, on one scale, as `render_text` draws one.

    Args:
        timelines: what to draw, such as a measured timeline and the simulated one.
        num_columns: most columns of a line.
        colour: as in `render_text`.
    """
    num_ranks = max(len(timeline.rows) for timeline in timelines)
    names = [f"rank {rank}" for rank in range(num_ranks)]
    margin = max(map(len, names)) + 1
    end_s = max(timeline.end_s for timeline in timelines)
    columns = max(_columns(t, end_s, num_columns - margin) for t in timelines)
    parts = []
    for timeline in timelines:
        lines = [timeline.title, timeline.subtitle, ""]
        for name, row in zip(names, timeline.rows):
            lines.append(name.ljust(margin) + _row(row, end_s, columns, colour))
        lines.append(" " * margin + _axis(end_s, columns))
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _columns(timeline: Timeline, end_s: float, most: int) -> int:
    """Enough columns for every label of a timeline that is drawn up to a time, if there are."""
    spans = [span for row in timeline.rows for span in row if span.end_s > span.start_s]
    if not spans:
        return max(1, most)
    per_second = max((len(s.label) + 1) / (s.end_s - s.start_s) for s in spans)
    shortest = min(s.end_s - s.start_s for s in spans)
    per_second = min(per_second, _MOST_COLUMNS_PER_ACTION / shortest)
    return max(1, min(most, round(per_second * end_s)))


def _row(row: tuple[Span, ...], end_s: float, columns: int, colour: bool) -> str:
    cells = []
    done = 0
    for span in row:
        first = round(span.start_s / end_s * columns) if end_s else 0
        stop = round(span.end_s / end_s * columns) if end_s else 0
        cells.append("·" * (first - done))
        width = stop - first
        letter = span.kind.value if span.kind is not None else ""
        text = (span.label if len(span.label) < width else letter).ljust(width)[:width]
        if colour and span.kind is not None and width:
            style = _COLOURS[span.kind] + (f";{_CRITICAL}" if span.is_critical else "")
            text = f"\x1b[{style}m{text}\x1b[0m"
        cells.append(text)
        done = max(done, stop)
    cells.append("·" * (columns - done))
    return "".join(cells)


def _axis(end_s: float, columns: int) -> str:
    end = f"{end_s:g}"
    return "0".ljust(max(1, columns - len(end))) + end
