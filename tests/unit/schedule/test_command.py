"""`merak schedule`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer

from merak.cli.schedule import schedule
from merak.core.errors import CommandError, ScheduleError
from merak.schedule.registry import build, names
from merak.schedule.serialize import load

ISSUE_NAMES = (
    "gpipe 1f1b early_recompute last_no_recompute shifted_critical_path interleaved_1f1b "
    "looped_bfs chimera gems zero_bubble_h1 zb_h2 interleaved_zero_bubble zero_bubble_v v_half "
    "v_min dualpipe_v pipedream pipedream_2bw auto"
).split()


def run(*arguments: str) -> None:
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(schedule)
    app(args=list(arguments), standalone_mode=False)


def test_the_list_has_every_name(capsys: pytest.CaptureFixture[str]) -> None:
    run("--list", "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["schedules"] == list(found["summaries"]) == ISSUE_NAMES
    run("--list")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ISSUE_NAMES
    assert list(names()) == ISSUE_NAMES


@pytest.mark.parametrize("name", ISSUE_NAMES)
def test_json_is_one_object_with_every_rank(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(name, "--stages", "4", "--microbatches", "8", "--json")
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert printed.err == ""
    assert found["name"] == name
    assert len(found["actions"]) == len(found["peak_in_flight"]) == 4
    assert found["makespan"] > 0 and 0 <= found["bubble_fraction"] < 1
    forwards = [a for own in found["actions"] for a in own if "F" in a]
    assert len(forwards) == found["stages"] * 8


def test_all_reduces_lengthen_a_stage_and_halves_hide_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    counts = ("--stages", "1", "--microbatches", "1", "--json")
    found = []
    for more in (("--layers", "8"), ("--all-reduce", "1"), ("--in-halves", "--all-reduce", "1")):
        run("gpipe", *counts, "--option", "recompute=true", "--layers", "8", *more)
        found.append(json.loads(capsys.readouterr().out)["makespan"])
    # F and, in one go, R and B; all-reduces of the same time as the forward's computation.
    forward_s, paper_s = 1 + 1 / 16, (0.75 + 0.5 + 7.75 * 3) / 8
    assert found == pytest.approx([1 + 1 + 2, 2 + 2 + 3, forward_s + paper_s])
    with pytest.raises(ScheduleError, match="--layers 0 --all-reduce 1 is no stage; give 1 layer"):
        run("gpipe", *counts, "--layers", "0", "--all-reduce", "1")


def test_times_are_taken_from_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    counts = ("--stages", "4", "--microbatches", "5", "--json")
    makespans = []
    for times in ((), ("--recompute", "0"), ("--forward", "2"), ("--transfer", "1")):
        run("1f1b", *counts, *times)
        makespans.append(json.loads(capsys.readouterr().out)["makespan"])
    # The last: on the way there and back through 3 transfers each, and 4 round trips to the last
    # stage's neighbour, which has two microbatches in flight.
    assert makespans[:3] == [32, 24, 40]
    assert makespans[3] > 32 + 6


def test_labels_name_the_stage_where_ranks_hold_several(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run("1f1b", "--stages", "2", "--microbatches", "2", "--json")
    assert json.loads(capsys.readouterr().out)["actions"][1] == ["F0", "B0", "F1", "B1"]
    run("chimera", "--stages", "2", "--microbatches", "2", "--json")
    assert json.loads(capsys.readouterr().out)["actions"][1] == ["0F1", "1F0", "1B0", "0B1"]


def test_the_page_shows_the_timeline_and_staleness(capsys: pytest.CaptureFixture[str]) -> None:
    run("pipedream", "--stages", "3", "--microbatches", "6")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "pipedream"
    assert lines[3].startswith("rank 0 F0 F1 F2 ")
    assert lines[-2:] == [
        "in flight, per rank: 3 2 1",
        "staleness, updates per stage at most: 2 1 0",
    ]


def test_a_schedule_that_became_another_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    run("shifted_critical_path", "--stages", "4", "--microbatches", "3", "--json")
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["name"] == "last_no_recompute"
    assert found["notes"] and found["notes"][0] in printed.err


def test_options_reach_the_builder(capsys: pytest.CaptureFixture[str]) -> None:
    run("chimera", "--stages", "4", "--microbatches", "4", "--option", "pairs=2", "--json")
    assert len(json.loads(capsys.readouterr().out)["pipes"]) == 4


def test_what_is_written_runs_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for suffix in (".txt", ".json"):
        path = tmp_path / f"mine{suffix}"
        run("chimera", "--stages", "4", "--microbatches", "8", "--output", str(path), "--json")
        first = json.loads(capsys.readouterr().out)
        assert load(path) == build("chimera", 4, 8)
        run(str(path), "--json")
        assert json.loads(capsys.readouterr().out) == first
    for suffix, start in ((".svg", "<svg "), (".html", "<!doctype html>")):
        path = tmp_path / f"drawn{suffix}"
        run("1f1b", "--stages", "2", "--microbatches", "2", "--output", str(path), "--json")
        assert path.read_text().startswith(start)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("", "Give a schedule's NAME: one of gpipe, 1f1b,"),
        ("1f1b --stages 4", "1f1b needs --stages P and --microbatches M."),
        ("1f1c", "There is no schedule '1f1c'; did you mean 1f1b?"),
        ("nonesuch --stages 4 --microbatches 4", "There is no schedule 'nonesuch'; choose one of"),
        ("none.txt", "The schedule file none.txt cannot be read (No such file or directory); name"),
        ("1f1b --stages 4 --microbatches 8 --memory-limit 3", "The least limit it fits is 4."),
        ("auto --stages 4 --microbatches 8 --memory-limit 0", "the least that one fits is 1."),
        ("auto --stages 0 --microbatches 8", "auto needs at least 1 stage; got 0."),
        ("1f1b --stages 2 --microbatches 2 --forward -1", "times and sizes are 0 or more."),
        ("1f1b --stages 2 --microbatches 2 --forward inf", "times and sizes are finite."),
        ("1f1b --stages 100000 --microbatches 8", "a pipeline of 100,000 ranks is longer than"),
        ("1f1b --stages 1000 --microbatches 1000", "are 1,000,000 forwards, more than the 131,072"),
        ("1f1b --stages 2 --microbatches 2 --option x", "--option x is not of the form KEY=VALUE."),
        ("1f1b --stages 2 --microbatches 2 --output a.gif", "a.gif has no suffix that can be writ"),
        ("1f1b --stages 2 --microbatches 2 --output no/a.txt", "no/a.txt cannot be written: No su"),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ScheduleError, CommandError), match=re.escape(sentence)):
        run(*arguments.split())


def test_an_error_in_a_file_is_pointed_at(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("microbatches: 1\nrank 0: F0 B0\nrank 1: B0 F0\n")
    with pytest.raises(ScheduleError, match="B0 at position 0 of rank 1 comes before its forward"):
        run(str(path))
    path.write_text("microbatches: 1\nrank 0: F0 Z0\n")
    with pytest.raises(ScheduleError, match=r"mine\.txt, line 2, rank 0: 'Z0' is not an action"):
        run(str(path))
