"""Files of a run's record: written and read back, and what readers are told of others."""

from __future__ import annotations

import json
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


def test_steps_of_several_schedules(tmp_path: Path) -> None:
    run = small_run()
    other = replace(run.steps[1].schedule, name="another")
    steps = (run.steps[0], replace(run.steps[1], schedule=other))
    found = read_run(written(tmp_path, replace(run, steps=steps)))
    assert [step.schedule.name for step in found.steps] == ["1f1b", "another"]
