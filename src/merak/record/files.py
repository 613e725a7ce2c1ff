"""Files of a run's record: JSON in the folder `_merak` of a run, of one version, without pickles.

`job.json` has the layout, `logs.jsonl` a line for each training log, and `steps.json` the measured
steps, which are replaced as the run goes on.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from merak.core.errors import RecordError
from merak.core.files.json_file import UnreadableFile, parse_json, read_json, read_text
from merak.core.files.private_files import write_aside
from merak.core.kinds import from_fields
from merak.record.consistency import job_problems, log_problems, step_problems
from merak.record.run import JobRecord, LogRecord, MeasuredStep, Record, RunRecord
from merak.schedule.ir import Schedule, parse_action
from merak.schedule.serialize import from_json, to_json
from merak.schedule.validate.schedule import check

FOLDER = "_merak"
"""Folder of the record in the folder of a run; what begins so is not uploaded with a model."""

VERSION = 1
"""Version of the record; a reader knows those up to its own."""

JOB, LOGS, STEPS = "job.json", "logs.jsonl", "steps.json"


class RecordWriter:
    """Writer of a run's record, of rank 0.

    Args:
        run: folder of the run.
        job: as it was laid out.
        goes_on: whether the run was resumed, so that the logs before it stay.
    """

    def __init__(self, run: str | os.PathLike[str], job: JobRecord, goes_on: bool) -> None:
        self.folder = Path(run, FOLDER)
        self.folder.mkdir(parents=True, exist_ok=True)
        if not goes_on:
            for name in (LOGS, STEPS):
                (self.folder / name).unlink(missing_ok=True)
        _replace(self.folder / JOB, {"version": VERSION, **_job_fields(job)})

    def add_log(self, log: LogRecord) -> None:
        """Add a log, as one line."""
        line = json.dumps({"version": VERSION, **asdict(log)})
        with (self.folder / LOGS).open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def write_steps(self, steps: Sequence[MeasuredStep]) -> None:
        """Replace the measured steps."""
        schedules: list[Schedule] = []
        rows = []
        for own in steps:
            if own.schedule not in schedules:
                schedules.append(own.schedule)
            rows.append(_step_fields(own, schedules.index(own.schedule)))
        texts = [json.loads(to_json(schedule)) for schedule in schedules]
        _replace(self.folder / STEPS, {"version": VERSION, "schedules": texts, "steps": rows})


def read_run(run: str | os.PathLike[str]) -> RunRecord:
    """Read the record of a run.

    Args:
        run: its folder, which its checkpoints are in.

    Raises:
        RecordError: it is no folder, has no record, or one that this version cannot read.
    """
    folder = Path(run)
    if not folder.is_dir():
        what = "is a file, not the folder of a run" if folder.exists() else "is not there"
        raise RecordError(f"{folder} {what}; give the output_dir of a training run.")
    place = record_folder(folder)
    if not (place / JOB).exists():
        raise RecordError(_without_record(folder))
    job = _read_job(place / JOB)
    logs = _last_of_each(_read_logs(place / LOGS)) if (place / LOGS).exists() else ()
    steps = _read_steps(place / STEPS) if (place / STEPS).exists() else ()
    return RunRecord(job, logs, steps)


def record_folder(run: str | os.PathLike[str]) -> Path:
    """Folder of a run's record, which may be given itself.

    Args:
        run: folder of the run.
    """
    inside = Path(run, FOLDER)
    return inside if (inside / JOB).exists() else Path(run)


def _without_record(folder: Path) -> str:
    found = [path.parent for path in sorted(folder.glob(f"*/{FOLDER}/{JOB}"))]
    runs = [str(path.parent) for path in found]
    if runs:
        return f"{folder} is no run, but holds runs; give one of them, such as {runs[0]}."
    if any(folder.glob("checkpoint-*")) or (folder / "config.json").is_file():
        return (
            f"{folder} has no record of its run ({FOLDER}/{JOB}), for it was trained with "
            "run_record=False, by an earlier version, or by another tool; train some steps with "
            "run_record=True."
        )
    return (
        f"{folder} is not the folder of a run: it has no {FOLDER}/{JOB}, which training writes "
        "into output_dir; give that folder."
    )


def _replace(path: Path, content: Mapping[str, Any]) -> None:
    write_aside(path, (json.dumps(content) + "\n").encode())


def _job_fields(job: JobRecord) -> dict[str, Any]:
    plain = {f.name: getattr(job, f.name) for f in fields(job) if f.name != "schedule"}
    plain["segments"] = [asdict(own) for own in job.segments]
    plain["memory"] = [asdict(own) for own in job.memory]
    plain["schedule"] = json.loads(to_json(job.schedule))
    plain["written_s"] = time.time()
    return plain


def _step_fields(step: MeasuredStep, schedule: int) -> dict[str, Any]:
    """A step with times in whole microseconds since its beginning."""
    begin = step.begin_s

    def micro(seconds: float) -> int:
        return round((seconds - begin) * 1e6)

    return {
        "step": step.step,
        "schedule": schedule,
        "begin_s": begin,
        "spans_us": [[micro(first), micro(last)] for first, last in step.spans],
        "ranks": [
            {
                "actions": [str(action) for action, _, _ in own],
                "start_us": [micro(start) for _, start, _ in own],
                "end_us": [micro(end) for _, _, end in own],
            }
            for own in step.records
        ],
    }


# ---- reading ----


def _load(path: Path) -> dict[str, Any]:
    try:
        return _checked(read_json(path, finite=False), str(path))
    except UnreadableFile as error:
        raise _damaged(f"{path} {error}") from error


def _checked(found: Any, where: str) -> dict[str, Any]:
    version = found.get("version") if isinstance(found, dict) else None
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise RecordError(
            f"{where} has no version, so it is no record of a run; give the output_dir of a "
            "training run."
        )
    if version > VERSION:
        raise RecordError(
            f"{where} has version {version} of the record, and this Merak reads up to version "
            f"{VERSION}; use the Merak that trained, or a later one."
        )
    return dict(found)


def _damaged(what: str) -> RecordError:
    return RecordError(
        f"{what}, so the record is damaged; train some more steps, which write it anew."
    )


@contextmanager
def _reading(where: str) -> Iterator[None]:
    """Put what is wrong with a part of the record into one sentence."""
    try:
        yield
    except RecordError:
        raise
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError) as error:
        lacks = isinstance(error, KeyError)
        why = f"{error.args[0]} is missing" if lacks else str(error).removesuffix(".")
        raise _damaged(f"{where} is wrong ({why})") from error


def _read_job(path: Path) -> JobRecord:
    content = _load(path)
    with _reading(str(path)):
        content["schedule"] = _schedule(content["schedule"])
        job = from_fields(JobRecord, content)
        _refuse(job_problems(job))
    return job


def _schedule(fields: object) -> Schedule:
    schedule = from_json(json.dumps(fields), "its schedule")
    check(schedule)
    return schedule


def _refuse(problems: Iterable[str]) -> None:
    for problem in problems:
        raise ValueError(problem)


def _read_logs(path: Path) -> Iterable[LogRecord]:
    try:
        lines = read_text(path).splitlines()
    except UnreadableFile as error:
        raise _damaged(f"{path} {error}") from error
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        try:
            content = parse_json(line, finite=False)
        except UnreadableFile as error:
            if number == len(lines):  # which a job that was killed has not finished
                return
            raise _damaged(f"{where} {error}") from error
        with _reading(where):
            log = from_fields(LogRecord, _checked(content, where))
            _refuse(log_problems(log))
            yield log


def _last_of_each(logs: Iterable[LogRecord]) -> tuple[LogRecord, ...]:
    """Logs without those of steps that a resumed run has repeated."""
    kept: list[LogRecord] = []
    for log in logs:
        while kept and kept[-1].step >= log.step:
            kept.pop()
        kept.append(log)
    return tuple(kept)


def _read_steps(path: Path) -> tuple[MeasuredStep, ...]:
    content = _load(path)
    with _reading(str(path)):
        schedules = [_schedule(own) for own in content["schedules"]]
        return tuple(_read_step(own, schedules) for own in content["steps"])


@dataclass(frozen=True, slots=True)
class _RankFields:
    """Actions of a pp rank in `steps.json`, and their times in microseconds."""

    actions: tuple[str, ...]
    start_us: tuple[float, ...]
    end_us: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _StepFields:
    """A measured step in `steps.json`; see `_step_fields`."""

    step: int
    schedule: int
    begin_s: float
    spans_us: tuple[tuple[float, float], ...]
    ranks: tuple[_RankFields, ...]


def _read_step(fields: object, schedules: Sequence[Schedule]) -> MeasuredStep:
    row = from_fields(_StepFields, fields, "a step")
    schedule, begin = schedules[row.schedule], row.begin_s
    records: list[tuple[Record, ...]] = []
    for own in row.ranks:
        times = zip(own.actions, own.start_us, own.end_us, strict=True)
        records.append(
            tuple(
                (parse_action(text), begin + start / 1e6, begin + end / 1e6)
                for text, start, end in times
            )
        )
    spans = tuple((begin + first / 1e6, begin + last / 1e6) for first, last in row.spans_us)
    step = MeasuredStep(row.step, schedule, tuple(records), spans)
    _refuse(step_problems(step))
    return step
