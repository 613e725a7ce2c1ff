"""Timelines for the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from merak.schedule.ir import Kind
from merak.schedule.simulator.timeline import Span, Timeline, longest_label, short_action_s

_COLOURS = {
    Kind.FORWARD: "44;97",
    Kind.RECOMPUTE: "46;30",
    Kind.BACKWARD: "42;30",
    Kind.INPUT_GRADIENT: "42;30",
    Kind.WEIGHT_GRADIENT: "43;30",
}
_CRITICAL = "1;4"
_MOST_COLUMNS_PER_ACTION = 6
_MOST_PANELS = 4
"""Pieces under one another that a picture is cut into for the sake of its labels."""


def render_text(timeline: Timeline, num_columns: int = 120, colour: bool = False) -> str:
    """Draw a timeline in columns of text, a line per rank.

    A box shows its action; idle time is dots. What is too long for a line goes on further below;
    what would take too many lines shows the kinds of actions alone.

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
    most = max(1, num_columns - margin)
    per_action, needed = _columns(timelines, end_s)
    labelled = needed <= most * _MOST_PANELS
    columns = (needed or most) if labelled else most
    if needed > most:  # lines end where actions do, if these are equally long
        most -= most % per_action
    parts = []
    for timeline in timelines:
        lines = [timeline.title, timeline.subtitle]
        for first in range(0, columns, most):
            panel = range(first, min(first + most, columns))
            lines.append("")
            for name, row in zip(names, timeline.rows):
                boxes = _boxes(row, end_s, columns, labelled)
                lines.append(name.ljust(margin) + _row(boxes, panel, colour))
            lines.append(" " * margin + _axis(end_s, columns, panel))
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _columns(timelines: Sequence[Timeline], end_s: float) -> tuple[int, int]:
    """Columns of a short action with its label, and of timelines up to a time; 0 for no actions."""
    per_action = min(len(longest_label(timelines)) + 1, _MOST_COLUMNS_PER_ACTION)
    action_s = short_action_s(timelines)
    if action_s is None:
        return per_action, 0
    return per_action, max(1, math.ceil(per_action / action_s * end_s - 1e-6))


@dataclass(frozen=True, slots=True)
class _Box:
    """An action in columns.

    Args:
        columns: from its first to behind its last.
        text: what it shows.
        letter: what it shows where that does not fit.
        style: an escape sequence's parameters; empty for none.
    """

    columns: range
    text: str
    letter: str
    style: str


def _boxes(row: Sequence[Span], end_s: float, columns: int, labelled: bool) -> list[_Box]:
    boxes = []
    for span in row:
        first = round(span.start_s / end_s * columns) if end_s else 0
        stop = round(span.end_s / end_s * columns) if end_s else 0
        letter = span.kind.value if span.kind is not None else ""
        style = "" if span.kind is None else _COLOURS[span.kind]
        style += f";{_CRITICAL}" if span.is_critical and style else ""
        text = span.label if labelled else letter
        boxes.append(_Box(range(first, stop), text, letter, style))
    return boxes


def _row(boxes: Sequence[_Box], panel: range, colour: bool) -> str:
    """The part of a rank's line that is in one panel."""
    cells = []
    done = panel.start
    for box in boxes:
        first, stop = max(box.columns.start, panel.start), min(box.columns.stop, panel.stop)
        if stop <= first:
            continue
        cells.append("·" * (first - done))
        width = stop - first
        # A box on the edge of two panels has its label in the larger part of it.
        begins, larger = first == box.columns.start, 2 * width > len(box.columns)
        is_named = larger or (begins and 2 * width == len(box.columns))
        shown = box.text if len(box.text) < width else box.letter
        text = (shown if is_named else "").ljust(width)[:width]
        cells.append(f"\x1b[{box.style}m{text}\x1b[0m" if colour and box.style else text)
        done = max(done, stop)
    cells.append("·" * (panel.stop - done))
    return "".join(cells)


def _axis(end_s: float, columns: int, panel: range) -> str:
    """The times at the two ends of a panel."""
    begin, end = (f"{end_s * column / columns:.6g}" for column in (panel.start, panel.stop))
    return begin.ljust(max(1, len(panel) - len(end))) + end
