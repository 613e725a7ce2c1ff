"""Schedules as text and as JSON, both ways.

The text form has a `name: value` line per field and a `rank r:` line per rank; a line that
starts with `#` is a comment:

    name: mine
    microbatches: 2
    rank 0: F0 F1 B0 B1
    rank 1: F0 B0 F1 B1

Everything else may be left out: `pipes` (rank r holds stage r), `microbatch_pipes`, `recompute` (no
on every stage), `eager_reduction` (yes), `microbatches_per_update` (all) and `weight_versions`.
Values per stage are separated by spaces, rows by commas.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from merak.core.errors import ScheduleError
from merak.core.files.json_file import UnreadableFile, parse_json, read_text
from merak.schedule.ir import Action, Schedule, parse_action

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

_YES_NO = {"yes": True, "no": False}


def to_text(schedule: Schedule) -> str:
    """Write a schedule as text that `from_text` reads back unchanged."""
    lines = [
        f"name: {schedule.name}",
        f"microbatches: {schedule.num_microbatches}",
        f"pipes: {_rows(schedule.pipes)}",
        f"microbatch_pipes: {_row(schedule.microbatch_pipes)}",
        f"recompute: {_flags(schedule.recompute)}",
        f"eager_reduction: {_flags(schedule.eager_reduction)}",
        f"microbatches_per_update: {schedule.microbatches_per_update}",
    ]
    if schedule.weight_versions:
        lines.append(f"weight_versions: {_rows(schedule.weight_versions)}")
    lines.extend(f"note: {note}" for note in schedule.notes)
    for rank in range(schedule.num_ranks):
        lines.append(f"rank {rank}: {' '.join(schedule.labels(rank))}".rstrip())
    return "\n".join(lines) + "\n"


def from_text(text: str, where: str = "schedule") -> Schedule:
    """Read a schedule from text.

    Args:
        text: see the module's description.
        where: what to call the text in messages, such as its file name.

    Raises:
        ScheduleError: with the line that is wrong.
    """
    lines = enumerate(
        ("" if line.lstrip().startswith("#") else line for line in text.splitlines()), start=1
    )
    return _from_lines([(f"{where}, line {number}", line) for number, line in lines], where)


def to_json(schedule: Schedule) -> str:
    """Write a schedule as a JSON object that `from_json` reads back unchanged."""
    return json.dumps(
        {
            "name": schedule.name,
            "pipes": schedule.pipes,
            "microbatch_pipes": schedule.microbatch_pipes,
            "recompute": schedule.recompute,
            "eager_reduction": schedule.eager_reduction,
            "microbatches_per_update": schedule.microbatches_per_update,
            "weight_versions": schedule.weight_versions,
            "notes": schedule.notes,
            "actions": [schedule.labels(rank) for rank in range(schedule.num_ranks)],
        }
    )


def from_json(text: str, where: str = "schedule") -> Schedule:
    """Read a schedule from JSON.

    Args:
        text: an object with the fields of `Schedule`; those with defaults in text may be left out.
        where: what to call the text in messages.

    Raises:
        ScheduleError: with the field that is wrong.
    """
    try:
        fields = parse_json(text)
    except UnreadableFile as error:
        raise ScheduleError(f"{where} {error}; write one object.") from error
    lists = fields.pop("actions", None) if isinstance(fields, dict) else None
    if not isinstance(lists, list) or not all(isinstance(own, list) for own in lists):
        raise ScheduleError(f"{where} needs an object with a list of actions per rank.")
    lines = [f"name: {fields.pop('name', 'schedule')}"]
    if "microbatch_pipes" not in fields:
        lines.append(f"microbatches: {fields.pop('microbatches', '')}")
    notes = fields.pop("notes", [])
    if not isinstance(notes, list) or not all(isinstance(note, str) for note in notes):
        raise ScheduleError(f"{where}: notes={notes!r} should be a list of texts.")
    lines += [f"note: {note}" for note in notes]
    for key, value in fields.items():
        if key != "weight_versions" or value:
            lines.append(f"{key}: {_json_value(value)}")
    lines.extend(f"rank {rank}: {' '.join(map(str, own))}" for rank, own in enumerate(lists))
    return _from_lines([(where, line) for line in lines], where)


def load(path: Path) -> Schedule:
    """Read a schedule from a file, JSON where its name ends in .json and text elsewhere.

    Raises:
        ScheduleError: the file cannot be read, or has an error.
    """
    try:
        text = read_text(path)
    except UnreadableFile as error:
        raise ScheduleError(f"The schedule file {path} {error}; name another.") from error
    return from_json(text, str(path)) if path.suffix == ".json" else from_text(text, str(path))


def _from_lines(lines: Iterable[tuple[str, str]], where: str) -> Schedule:
    """Read lines of the text form, each with its place for messages."""
    fields: dict[str, tuple[str, str]] = {}
    ranks: dict[int, tuple[str, str]] = {}
    notes = []
    for place, line in lines:
        key, colon, value = (part.strip() for part in line.partition(":"))
        if not (key or colon):
            continue
        if not colon:
            raise ScheduleError(f"{place}: {line.strip()!r} is not of the form name: value.")
        if key == "note":
            notes.append(value)
        elif key.startswith("rank "):
            _put(ranks, _parse(int, key[5:], place), value, place)
        elif key in _READERS or key in ("name", "microbatches"):
            _put(fields, key, value, place)
        else:
            known = ", ".join(("name", "microbatches", *_READERS, "note", "rank N"))
            raise ScheduleError(f"{place}: unknown field {key!r}; use {known}.")
    return _assemble(fields, ranks, tuple(notes), where)


def _row(values: tuple[int, ...]) -> str:
    return " ".join(map(str, values))


def _rows(rows: tuple[tuple[int, ...], ...]) -> str:
    return ", ".join(map(_row, rows))


def _flags(values: tuple[bool, ...]) -> str:
    return " ".join("yes" if value else "no" for value in values)


def _json_value(value: Any) -> str:
    """A JSON value in the text form."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        separator = ", " if value and isinstance(value[0], list) else " "
        return separator.join(map(_json_value, value))
    return str(value)


def _put(target: dict[_Key, tuple[str, str]], key: _Key, value: str, place: str) -> None:
    if key in target:
        raise ScheduleError(f"{place}: {key!r} stands here a second time.")
    target[key] = (value, place)


def _parse(reader: Callable[[str], _Value], text: str, place: str) -> _Value:
    try:
        return reader(text)
    except ScheduleError as error:
        raise ScheduleError(f"{place}: {error}") from error
    except (ValueError, KeyError) as error:
        raise ScheduleError(f"{place}: {text!r} cannot be read.") from error


def _read_row(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split()))


def _read_rows(text: str) -> tuple[tuple[int, ...], ...]:
    return tuple(map(_read_row, text.split(",")))


def _read_flags(text: str) -> tuple[bool, ...]:
    return tuple(_YES_NO[word] for word in text.split())


_READERS: Mapping[str, Callable[[str], Any]] = {
    "pipes": _read_rows,
    "microbatch_pipes": _read_row,
    "recompute": _read_flags,
    "eager_reduction": _read_flags,
    "microbatches_per_update": int,
    "weight_versions": _read_rows,
}


def _assemble(
    fields: dict[str, tuple[str, str]],
    ranks: dict[int, tuple[str, str]],
    notes: tuple[str, ...],
    where: str,
) -> Schedule:
    if sorted(ranks) != list(range(len(ranks))) or not ranks:
        raise ScheduleError(
            f"{where} has lines for ranks {sorted(ranks)}; give one for every rank, from 0."
        )
    read = {
        key: _parse(_READERS[key], value, place)
        for key, (value, place) in fields.items()
        if key in _READERS
    }
    pipes = read.get("pipes", (tuple(range(len(ranks))),))
    microbatch_pipes = read.get("microbatch_pipes")
    if microbatch_pipes is None:
        if "microbatches" not in fields:
            raise ScheduleError(f"{where} does not say how many microbatches there are.")
        microbatch_pipes = (0,) * _parse(int, *fields["microbatches"])
    num_stages = len(pipes[0])
    held = {(rank, stage) for pipe in pipes for stage, rank in enumerate(pipe)}
    return Schedule(
        name=fields.get("name", ("schedule", ""))[0],
        pipes=pipes,
        microbatch_pipes=microbatch_pipes,
        actions=tuple(_read_actions(*ranks[r], held, r) for r in range(len(ranks))),
        recompute=read.get("recompute", (False,) * num_stages),
        eager_reduction=read.get("eager_reduction", (True,) * num_stages),
        microbatches_per_update=read.get("microbatches_per_update", len(microbatch_pipes)),
        weight_versions=read.get("weight_versions", ()),
        notes=notes,
    )


def _read_actions(
    text: str, place: str, held: set[tuple[int, int]], rank: int
) -> tuple[Action, ...]:
    stages = [stage for holder, stage in held if holder == rank]
    only_stage = stages[0] if len(stages) == 1 else None
    return tuple(
        _parse(lambda word: parse_action(word, only_stage), word, f"{place}, rank {rank}")
        for word in text.split()
    )
