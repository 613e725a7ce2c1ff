"""Pictures of schedules."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from merak.schedule.catalog import FORMULAS
from merak.schedule.costs import uniform
from merak.schedule.registry import build
from merak.schedule.render.svg import (
    render_html,
    render_svg,
)
from merak.schedule.render.text import render_text, render_texts
from merak.schedule.simulator.simulate import simulate
from merak.schedule.simulator.timeline import Timeline, measured_timeline, simulated_timeline
from tests.unit.schedule.grid import simulated

SVG = "{http://www.w3.org/2000/svg}"


def timeline(name: str, num_ranks: int = 4, num_microbatches: int = 8) -> Timeline:
    return simulated_timeline(simulated(name, num_ranks, num_microbatches))


def test_a_timeline_in_text() -> None:
    drawn = render_text(timeline("shifted_critical_path", 4, 5))
    assert drawn == "\n".join(
        (
            "shifted_critical_path",
            "4 ranks, 4 stages, 5 microbatches: makespan 26, bubble 27.9 % of all time, "
            "at most 4 in flight",
            "",
            "rank 0 F0 F1 F2 F3 ··················B0       F4 B1       R2 B2    R3 B3    R4 B4    ",
            "rank 1 ···F0 F1 F2 R0 ·········B0    F3 B1       F4 B2       R3 B3    R4 B4    ······",
            "rank 2 ······F0 F1 F2 R0 B0    R1 B1    F3 B2       F4 B3       B4       ············",
            "rank 3 ·········F0 B0    F1 B1    F2 B2    F3 B3    ···F4 B4    ·····················",
            "       0" + " " * 75 + "26",
        )
    )


def test_text_keeps_to_its_columns_and_shows_kinds_where_labels_do_not_fit() -> None:
    lines = render_text(timeline("zero_bubble_v"), num_columns=24).splitlines()
    assert max(map(len, lines[3:])) <= 24
    assert all("F" in line and not re.search(r"\d", line[7:]) for line in lines[3:7])


@pytest.mark.parametrize("num_columns", [70, 100, 163])
def test_what_is_too_long_for_a_line_goes_on_below(num_columns: int) -> None:
    """Labels of two digits are there as those of one are, and none is cut."""
    whole = render_text(timeline("1f1b", 4, 12), num_columns=1000).splitlines()
    drawn = render_text(timeline("1f1b", 4, 12), num_columns).splitlines()
    assert max(map(len, drawn[3:])) <= num_columns
    for rank in range(4):
        rows = [line[7:] for line in drawn if line.startswith(f"rank {rank}")]
        assert len(rows) > 1
        expected = next(line[7:] for line in whole if line.startswith(f"rank {rank}"))
        assert len("".join(rows)) == len(expected)
        found = re.findall(r"[FB]\d+", " ".join(rows))
        assert found == re.findall(r"[FB]\d+", expected)
        assert {*found} == {f"{kind}{m}" for kind in "FB" for m in range(12)}
    axes = [line.split() for line in drawn if not line.startswith(("rank", "1f1b", "4"))]
    ends = [axis for axis in axes if len(axis) == 2]
    assert [ends[0][0], ends[-1][1]] == ["0", "60"]
    assert all(one[1] == two[0] for one, two in itertools.pairwise(ends))


@pytest.mark.parametrize("num_microbatches", [8, 12, 32, 101])
def test_an_svg_is_wide_enough_for_its_labels(num_microbatches: int) -> None:
    drawn = ET.fromstring(render_svg([timeline("1f1b", 2, num_microbatches)]))
    labels = [t.text for t in drawn.iter(f"{SVG}text") if "label" in t.get("class", "").split()]
    assert len(labels) == 2 * 2 * num_microbatches
    assert f"F{num_microbatches - 1}" in labels


def test_colour_adds_nothing_but_escape_sequences() -> None:
    drawn = timeline("zero_bubble_h1")
    coloured = render_text(drawn, colour=True)
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == render_text(drawn)
    assert coloured != render_text(drawn)


@pytest.mark.parametrize("name", sorted(FORMULAS))
def test_an_svg_has_a_box_with_its_times_for_every_action(name: str) -> None:
    simulation = simulated(name, 4, 8)
    root = ET.fromstring(render_svg([simulated_timeline(simulation)]))
    boxes = [r for r in root.iter(f"{SVG}rect") if "box" in r.get("class", "").split()]
    assert len(boxes) == simulation.table.num_actions
    critical = [box for box in boxes if "critical" in box.get("class", "").split()]
    assert len(critical) == len(simulation.critical_path)
    assert all("on the critical path" in (box.findtext(f"{SVG}title") or "") for box in critical)
    hovers = sorted(box.findtext(f"{SVG}title") or "" for box in boxes)
    label = simulation.schedule.label(simulation.schedule.actions[0][0])
    assert any(hover.startswith(f"{label}: forward, stage 0, microbatch 0") for hover in hovers)
    assert any(hover.endswith("\n0 to 1, 1 long") for hover in hovers)


def test_boxes_lie_inside_the_picture_and_do_not_overlap() -> None:
    root = ET.fromstring(render_svg([timeline("chimera")], width=900))
    rows: dict[str, list[tuple[float, float]]] = {}
    for rect in root.iter(f"{SVG}rect"):
        if "box" in rect.get("class", "").split():
            x, width = float(rect.get("x", "")), float(rect.get("width", ""))
            rows.setdefault(rect.get("y", ""), []).append((x, x + width))
    assert len(rows) == 4
    for row in rows.values():
        row.sort()
        assert row[-1][1] <= 900
        assert all(a[1] <= b[0] + 0.02 for a, b in itertools.pairwise(row))


def test_timelines_share_one_scale() -> None:
    both = render_svg([timeline("1f1b"), timeline("shifted_critical_path")])
    assert both.count('class="title"') == 2
    alone = render_svg([timeline("1f1b")])
    first = re.compile(r'class="box[^"]*" x="[\d.]+" y="\d+" width="([\d.]+)"')
    assert first.search(both) is not None
    assert first.search(both)[1] == first.search(alone)[1]  # type: ignore[index]


def test_reductions_and_recomputations_inside_are_shown() -> None:
    costs = replace(uniform(4), reduction_s=(2.0,) * 4)
    drawn = render_svg([simulated_timeline(simulate(build("chimera", 4, 4), costs))])
    assert drawn.count("reduction of stage 3") == 2
    assert "gradient reduction" in drawn
    assert "recomputes inside" in render_svg([timeline("1f1b")])
    assert "recomputes inside" not in render_svg([timeline("gems")])


def test_timelines_in_text_share_one_scale() -> None:
    long, short = timeline("1f1b", 4, 5), timeline("shifted_critical_path", 4, 5)
    both = render_texts([long, short], num_columns=200)
    first, second = both.split("\n\n" + short.title)
    assert first == render_text(long, num_columns=200)
    # As long as the other one's rows: 26 of 32 units, then nothing.
    columns = len(first.splitlines()[3])
    rows = [line for line in second.splitlines() if line.startswith("rank")]
    assert len(rows) == 4 and all(len(row) == columns for row in rows)
    assert max(len(row.rstrip("·")) for row in rows) == 7 + round((columns - 7) * 26 / 32)
    assert second.splitlines()[-1].endswith(" 32")


def test_a_measured_timeline_is_drawn_over_the_simulated_one() -> None:
    simulation = simulated("1f1b", 2, 2)
    # The same iteration at a tenth of a second per unit, on a clock that started long ago.
    records = [
        [
            (action, 100 + simulation.start[first + i] / 10, 100 + simulation.end[first + i] / 10)
            for i, action in enumerate(actions)
        ]
        for first, actions in zip(simulation.table.starts, simulation.schedule.actions)
    ]
    measured = measured_timeline(simulation.schedule, records)
    drawn = simulated_timeline(simulation)
    assert measured.title == "1f1b, measured"
    assert measured.end_s == pytest.approx(drawn.end_s / 10)
    assert measured.subtitle == "makespan 1.2, bubble 33.3 % of all time"
    assert [[s.label for s in row] for row in measured.rows] == [
        [s.label for s in row] for row in drawn.rows
    ]
    assert [s.start_s for s in measured.rows[1]] == pytest.approx(
        [s.start_s / 10 for s in drawn.rows[1]]
    )
    assert render_svg([measured, drawn]).count('class="title"') == 2


def test_html_is_one_page_that_needs_nothing_else() -> None:
    page = render_html([timeline("dualpipe_v")])
    assert page.startswith("<!doctype html>")
    assert "<title>dualpipe_v</title>" in page
    links = re.findall(r'(?:src|href)=|url\(|https?://[^"\s]+', page)
    assert links == ["http://www.w3.org/2000/svg"]


def test_names_are_escaped() -> None:
    drawn = replace(timeline("1f1b"), title="<mine> & yours")
    assert ET.fromstring(render_svg([drawn])) is not None
    assert "&lt;mine&gt; &amp; yours" in render_html([drawn])
