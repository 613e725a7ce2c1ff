"""Files of a run's record: written and read back, and what readers are told of others."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from merak.core.errors import RecordError
from merak.record.files import RecordWriter, read_run
from merak.record.run import RunRecord
from tests.unit.record.runs import log_of, small_run


def written(folder: Path, run: RunRecord) -> Path:
    writer = RecordWriter(folder, run.job, goes_on=False)
    for log in run.logs:
        writer.add_log(log)
    writer.write_steps(run.steps)
    return folder


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = small_run()
    found = read_run(written(tmp_path, run))
    assert found.job == run.job
    assert found.logs == run.logs
    for own, step in zip(found.steps, run.steps, strict=True):
        assert (own.step, own.schedule) == (step.step, step.schedule)
        for row, expected in zip(own.records, step.records, strict=True):
            assert [action for action, _, _ in row] == [action for action, _, _ in expected]
            assert [t for _, *times in row for t in times] == pytest.approx(
                [t for _, *times in expected for t in times], abs=1e-6
            )
    assert read_run(tmp_path / "_merak") == found  # the folder of the record itself


def test_files_are_json_and_small(tmp_path: Path) -> None:
    written(tmp_path, small_run())
    files = sorted(path.name for path in (tmp_path / "_merak").iterdir())
    assert files == ["job.json", "logs.jsonl", "steps.json"]
    for name in ("job.json", "steps.json"):
        assert json.loads((tmp_path / "_merak" / name).read_text())["version"] == 1
    assert sum(path.stat().st_size for path in (tmp_path / "_merak").iterdir()) < 20_000


def test_a_run_that_goes_on_keeps_its_logs_and_a_new_one_does_not(tmp_path: Path) -> None:
    run = small_run()
    written(tmp_path, run)
    writer = RecordWriter(tmp_path, run.job, goes_on=True)
    writer.add_log(log_of(20, bubble=0.1))  # step 30 was lost with what came after the checkpoint
    found = read_run(tmp_path)
    assert [log.step for log in found.logs] == [10, 20]
    assert found.logs[-1].figures["bubble"] == 0.1 and found.steps
    RecordWriter(tmp_path, run.job, goes_on=False)
    assert read_run(tmp_path) == RunRecord(run.job, (), ())


def test_a_line_that_a_killed_job_has_not_finished_is_left(tmp_path: Path) -> None:
    written(tmp_path, small_run())
    with (tmp_path / "_merak" / "logs.jsonl").open("a") as file:
        file.write('{"version": 1, "step": 40, "ti')
    assert [log.step for log in read_run(tmp_path).logs] == [10, 20, 30]


def test_fields_of_a_later_minor_change_are_left(tmp_path: Path) -> None:
    written(tmp_path, small_run())
    path = tmp_path / "_merak" / "job.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "colour": "blue"}))
    assert read_run(tmp_path).job == small_run().job


def refusal(folder: Path) -> str:
    with pytest.raises(RecordError) as caught:
        read_run(folder)
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".")
    return message


def test_what_is_no_run(tmp_path: Path) -> None:
    assert refusal(tmp_path / "nowhere").endswith(
        "nowhere is not there; give the output_dir of a training run."
    )
    (tmp_path / "file").write_text("")
    assert "is a file, not the folder of a run" in refusal(tmp_path / "file")
    assert "it has no _merak/job.json" in refusal(tmp_path)


def test_a_run_without_a_record(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-10").mkdir()
    assert "has no record of its run" in refusal(tmp_path)
    assert "run_record=True" in refusal(tmp_path)


def test_a_folder_of_runs(tmp_path: Path) -> None:
    written(tmp_path / "first", small_run())
    assert refusal(tmp_path).endswith(f"give one of them, such as {tmp_path / 'first'}.")


@pytest.mark.parametrize("name", ["job.json", "steps.json"])
def test_a_record_of_a_newer_version(tmp_path: Path, name: str) -> None:
    written(tmp_path, small_run())
    path = tmp_path / "_merak" / name
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 2}))
    assert refusal(tmp_path) == (
        f"{path} has version 2 of the record, and this Merak reads up to version 1; use the Merak "
        "that trained, or a later one."
    )


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("job.json", "{", "is not JSON"),
        ("job.json", "[]", "has no version"),
        ("job.json", '{"version": 1}', "is damaged"),
        ("steps.json", '{"version": 1, "schedules": [], "steps": [{"schedule": 3}]}', "is damaged"),
    ],
)
def test_a_damaged_record(tmp_path: Path, name: str, content: str, expected: str) -> None:
    written(tmp_path, small_run())
    (tmp_path / "_merak" / name).write_text(content)
    assert expected in refusal(tmp_path)


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        (("versions", "torch"), None, "versions.torch is None, not a text"),
        (("degrees",), {"dp": 1}, "degrees.tp is no degree"),
        (("degrees", "pp"), 3, "its schedule has 2 ranks, and pp is 3"),
        (("degrees", "dp"), 10**30, "degrees.dp is no degree"),
        (("microbatch",), [1, "2"], "microbatch[1] is '2', not a whole number"),
        (("memory",), [], None),
        (("memory", 1), {}, "memory[1].peak_bytes is missing"),
        (("memory", 0, "peak_bytes"), 0, "a rank has no memory"),
        (("segments", 0, "forward_s"), -1, "a figure is below 0"),
        (("segments", 0, "forward_s"), float("nan"), "a figure is below 0"),
        (("stages",), [[0, 1, 2], [3, 4, 4]], "its stages do not have every segment once"),
        (("schedule", "actions", 0), ["F0"], "is invalid"),
        (("schedule",), None, "needs an object with a list of actions"),
        (("flops",), 10**400, "too large"),
    ],
)
def test_a_job_that_cannot_be(
    tmp_path: Path, path: tuple[str | int, ...], value: object, why: str | None
) -> None:
    written(tmp_path, small_run())
    file = tmp_path / "_merak" / "job.json"
    job = inner = json.loads(file.read_text())
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    file.write_text(json.dumps(job))
    if why is None:
        assert read_run(tmp_path).job.memory == ()
    else:
        assert why in refusal(tmp_path)


@pytest.mark.parametrize("name", ["job.json", "logs.jsonl", "steps.json"])
def test_a_pipe_or_folder_in_a_files_place(tmp_path: Path, name: str) -> None:
    written(tmp_path, small_run())
    file = tmp_path / "_merak" / name
    file.unlink()
    os.mkfifo(file)
    assert f"{file} cannot be read (it is no regular file), so the record" in refusal(tmp_path)
    file.unlink()
    file.mkdir()
    assert f"{file} cannot be read (Is a directory), so the record" in refusal(tmp_path)


def test_logs_and_steps_that_cannot_be(tmp_path: Path) -> None:
    written(tmp_path, small_run())
    logs, steps = (tmp_path / "_merak" / name for name in ("logs.jsonl", "steps.json"))
    whole = logs.read_text()
    logs.write_text(whole.replace('"step": 20', '"step": "20"'))
    assert "logs.jsonl, line 2 is wrong (step is '20', not a whole number)" in refusal(tmp_path)
    logs.write_text(whole.replace('"loss": ', '"loss": NaN, "other": '))
    assert read_run(tmp_path).logs  # as a run that has failed has it
    found = json.loads(steps.read_text())
    for change, why in (
        ({"schedule": 3}, "list index out of range"),
        ({"ranks": found["steps"][0]["ranks"][:1]}, "a step has 1 ranks, and its schedule 2"),
        ({"ranks": found["steps"][0]["ranks"][::-1]}, "other actions than its schedule"),
        ({"spans_us": [[0, 1], [0, 1, 2]]}, "a step.spans_us[1] has 3 values, not 2"),
        ({"begin_s": 1e300}, "a step has a time that is none"),
    ):
        steps.write_text(json.dumps({**found, "steps": [found["steps"][0] | change]}))
        assert why in refusal(tmp_path)


def test_steps_of_several_schedules(tmp_path: Path) -> None:
    run = small_run()
    other = replace(run.steps[1].schedule, name="another")
    steps = (run.steps[0], replace(run.steps[1], schedule=other))
    found = read_run(written(tmp_path, replace(run, steps=steps)))
    assert [step.schedule.name for step in found.steps] == ["1f1b", "another"]
