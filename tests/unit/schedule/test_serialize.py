"""Schedules as text and JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from merak.core.errors import ScheduleError
from merak.schedule.registry import build, is_file, resolve
from merak.schedule.serialize import from_json, from_text, load, to_json, to_text
from merak.schedule.validate.schedule import validate
from tests.unit.schedule.grid import every_schedule

MINE = """
# Two stages, one rank each.
name: mine
microbatches: 2
rank 0: F0 F1 B0 B1
rank 1: F0 B0 F1 B1
"""


def test_every_schedule_reads_back() -> None:
    for schedule in every_schedule((1, 2, 4), (1, 3, 4, 8)):
        assert from_text(to_text(schedule)) == schedule
        assert from_json(to_json(schedule)) == schedule


def test_what_may_be_left_out_has_its_usual_value() -> None:
    schedule = from_text(MINE)
    assert schedule.pipes == ((0, 1),)
    assert schedule.recompute == (False, False)
    assert schedule.eager_reduction == (True, True)
    assert schedule.microbatches_per_update == 2
    assert schedule.is_synchronous
    assert not validate(schedule)
    short = {"name": "mine", "microbatches": 2}
    lists = [["F0", "F1", "B0", "B1"], ["F0", "B0", "F1", "B1"]]
    assert from_json(json.dumps({**short, "actions": lists})) == schedule


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("rank 0: F0 X1\nmicrobatches: 1", "schedule, line 1, rank 0: 'X1' is not an action"),
        ("\nfoo", "schedule, line 2: 'foo' is not of the form name: value."),
        ("bar: 3", "schedule, line 1: unknown field 'bar'; use name, microbatches, pipes,"),
        ("rank 0: F0 B0", "schedule does not say how many microbatches there are."),
        ("rank 1: F0", "schedule has lines for ranks [1]; give one for every rank, from 0."),
        ("microbatches: 1", "schedule has lines for ranks []; give one for every rank"),
        ("rank x: F0", "schedule, line 1: 'x' cannot be read."),
        ("rank 0: F0\nrank 0: B0", "schedule, line 2: 0 stands here a second time."),
        ("recompute: maybe\nrank 0: F0", "schedule, line 1: 'maybe' cannot be read."),
        ("pipes: 0 0\nmicrobatches: 1\nrank 0: F0", "line 3, rank 0: 'F0' names no stage"),
    ],
)
def test_errors_point_at_the_line(text: str, sentence: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(sentence)):
        from_text(text)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "schedule is not JSON (Expecting"),
        ("[]", "schedule needs an object with a list of actions per rank."),
        ('{"actions": [1]}', "schedule needs an object with a list of actions per rank."),
        ('{"actions": [["X0"]], "microbatches": 1}', "schedule, rank 0: 'X0' is not an action"),
        ('{"actions": [["F0"]], "colour": 1}', "schedule: unknown field 'colour'"),
        ('{"actions": [["F0"]], "notes": 1}', "schedule: notes=1 should be a list of texts."),
        ('{"actions": [["F0"]]}', "schedule: '' cannot be read."),
    ],
)
def test_errors_in_json_point_at_the_field(text: str, sentence: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(sentence)):
        from_json(text)


def test_files_are_read_by_their_suffix(tmp_path: Path) -> None:
    schedule = build("chimera", 4, 4)
    (tmp_path / "a.json").write_text(to_json(schedule))
    (tmp_path / "a.txt").write_text(to_text(schedule))
    assert load(tmp_path / "a.json") == load(tmp_path / "a.txt") == schedule
    with pytest.raises(ScheduleError, match=r"none\.txt cannot be read \(No such file"):
        load(tmp_path / "none.txt")


def test_a_file_stands_wherever_a_name_does(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(MINE)
    assert is_file(str(path)) and not is_file("1f1b") and not is_file("nonesuch")
    assert resolve(str(path), 2, 2) == from_text(MINE)
    assert resolve("1f1b", 2, 2, recompute=False) == build("1f1b", 2, 2, recompute=False)
    with pytest.raises(ScheduleError, match="for 2 ranks and 2 microbatches; asked for 2 and 4"):
        resolve(str(path), 2, 4)
    with pytest.raises(ScheduleError, match="from a file takes no options; got chunks"):
        resolve(str(path), 2, 2, chunks=2)
    path.write_text(MINE.replace("F0 F1 B0 B1", "F0 F1 B0"))
    with pytest.raises(ScheduleError, match="mine is invalid: microbatch 1 on stage 0 has no comp"):
        resolve(str(path), 2, 2)
