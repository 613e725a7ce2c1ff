"""The map of techniques: every row is whole, and names arguments, tests and files that exist."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import merak
from merak.cli.main import main
from merak.schedule.registry import names as schedule_names

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "map.md"
LEFT_OUT, NONE, NOT_MEASURED = "left out: ", "–", "not measured"
COLUMNS = ["technique", "in Merak", "turned on by", "test", "figures"]

QUOTED = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\]\(([^)#]+)[^)]*\)")
IN_MODELS = {"nn.Embedding(sparse=True)"}
"""What a model says, not an argument of Merak."""


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def rows() -> list[list[str]]:
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    return [row for row in map(cells, lines) if row != COLUMNS and set(row[0]) != {"-"}]


ROWS = rows()
BUILT = [row for row in ROWS if not row[1].startswith(LEFT_OUT)]


def is_option(text: str) -> bool:
    """Whether a text is an argument of Merak, of `merak.init`, a class, a command, or a file."""
    fields = {field.name for field in dataclasses.fields(merak.MerakArguments)}
    if text.startswith("merak.init("):
        names = re.findall(r"(\w+)=", text)
        return bool(names) and set(names) <= inspect.signature(merak.init).parameters.keys()
    if text.startswith("merak."):
        return text.removeprefix("merak.") in merak.__all__
    if text.startswith("merak "):
        return is_command(text.removeprefix("merak "))
    name, _, value = text.partition("=")
    if name == "schedule" and value:
        return value.strip('"') in schedule_names()
    return name in fields or text in IN_MODELS or (ROOT / text).is_file()


def is_command(name: str) -> bool:
    return main([name, "--help"]) == 0


def test_what_is_looked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert is_option("zero") and is_option("merak.init(dp=…, tp=…)") and is_option("merak plan")
    assert is_option('schedule="gems"') and not is_option('schedule="nowhere"')
    assert not is_option("nowhere") and not is_option("merak.init(nowhere=…)")
    assert is_option("merak.OneBitAdam") and not is_option("merak.Nowhere")
    assert not is_option("merak nowhere") and not is_option("examples/nowhere.py")


def test_a_row_says_what_is_there_or_why_it_is_not() -> None:
    assert len(ROWS) > 50 and len(BUILT) > 30
    for row in ROWS:
        assert len(row) == len(COLUMNS), row
        missing = [cell in ("", NONE) for cell in row]
        if row[1].startswith(LEFT_OUT):
            assert missing == [False, False, True, True, True], row
            assert len(row[1].removeprefix(LEFT_OUT).split()) >= 4, row
        else:
            assert not any(missing), row


def test_what_turns_a_technique_on_exists(capsys: pytest.CaptureFixture[str]) -> None:
    for row in BUILT:
        named = QUOTED.findall(row[2])
        assert named or row[2] == "always", row
        assert [text for text in named if not is_option(text)] == [], row


def test_tests_and_figures_exist() -> None:
    for row in BUILT:
        tests = QUOTED.findall(row[3])
        assert tests and all(text.startswith("tests/") for text in tests), row
        figures = [ROOT / text for text in QUOTED.findall(row[4])]
        figures += [PAGE.parent / target for target in LINK.findall(row[4])]
        assert figures or row[4] == NOT_MEASURED, row
        named = [*(ROOT / text for text in tests), *figures]
        assert [str(path) for path in named if not path.is_file()] == [], row
