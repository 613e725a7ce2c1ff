"""Plan files: what is written is read, and what is wrong is refused with its difference."""

from __future__ import annotations

import json
from types import MappingProxyType

import pytest
from torch import nn

from merak.core.errors import PlanError
from merak.core.files.plan_file import plan_degrees
from merak.plan.price.candidate import Candidate
from merak.plan.search.plan_file import (
    job_differences,
    plan_of,
    read_plan,
    refuse_other_model,
    write_plan,
)
from tests.unit.plan.search.doubles import Double, workload_of

CANDIDATE = Candidate(
    dp=2, pp=2, microbatch=2, num_microbatches=4, schedule="interleaved_1f1b",
    schedule_options=MappingProxyType({"chunks": 2}), partition=(1, 2, 2, 1), zero=1,
)  # fmt: skip


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "plan.json"
    write_plan(file, plan_of(workload_of(nn.Linear(3, 4)), Double().price(CANDIDATE), "h100:4"))
    return file


def test_a_plan_is_read_as_it_was_written(path):
    plan = read_plan(path)
    assert plan.candidate == CANDIDATE
    assert plan.world_size == 4 and plan.cluster == "h100:4"
    assert plan.price["step_s"] == Double().price(CANDIDATE).step_s
    assert plan_degrees(path) == (2, 1, 2, 1, 1)


def test_another_model_is_refused_by_its_first_difference(path):
    plan = read_plan(path)
    refuse_other_model(plan, nn.Linear(3, 4), str(path))
    with pytest.raises(PlanError, match="out_features is 4 in the plan and 5 in the model"):
        refuse_other_model(plan, nn.Linear(3, 5), str(path))


def changed(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return path


def without_checksum(path):
    """The file as a Merak before there were checksums wrote it."""
    content = json.loads(path.read_text())
    del content["checksum"]
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    "field", ["world_size", "global_batch", "model", "cluster", "sequence", "optimizer", "autocast"]
)
def test_a_plan_whose_job_was_changed_is_refused(path, field):
    whole, known = path.read_text(), read_plan(path)
    with pytest.raises(PlanError, match="is not for what it was made for"):
        read_plan(changed(path, **{field: "other"}))
    path.write_text(whole)
    own = known.candidate.num_microbatches
    changed(path, candidate=json.loads(whole)["candidate"] | {"schedule": "gpipe"})
    assert read_plan(path).candidate.num_microbatches == own  # what was planned may be changed
    assert read_plan(without_checksum(path)).model == known.model


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("schedule", 7, "schedule is 7, not a text"),
        ("microbatch", "2", "microbatch is '2', not a whole number"),
        ("microbatch", True, "microbatch is True, not a whole number"),
        ("partition", [2, None], "partition[1] is None, not a whole number"),
        ("partition", [2, -1], "is below 1"),
        ("sequence_parallel", "no", "sequence_parallel is 'no', not true or false"),
        ("colour", "blue", "colour is unknown"),
    ],
)
def test_a_candidate_of_other_types_is_refused(path, field, value, why):
    candidate = json.loads(path.read_text())["candidate"] | {field: value}
    with pytest.raises(PlanError) as caught:
        read_plan(changed(path, candidate=candidate))
    assert "has an error (" in str(caught.value) and why in str(caught.value)


def test_files_that_are_no_plans_are_refused(path, tmp_path):
    with pytest.raises(PlanError, match=r"cannot be read \(No such file"):
        read_plan(tmp_path / "none.json")
    with pytest.raises(PlanError, match="has version 7, and this Merak reads version 2"):
        read_plan(changed(path, version=7))
    with pytest.raises(PlanError, match="is not for what it was made for: its checksum is"):
        read_plan(changed(path, version=2, world_size=9))
    with pytest.raises(PlanError, match="has an error"):
        read_plan(without_checksum(path))
    with pytest.raises(PlanError, match="has no degrees"):
        plan_degrees(changed(path, candidate={"dp": 2}))
    with pytest.raises(PlanError, match="is no plan"):
        read_plan(changed(path, format="other"))
    path.write_text("{")
    with pytest.raises(PlanError, match="is not JSON"):
        read_plan(path)


def test_another_sequence_or_optimizer_is_warned_of(path):
    plan = read_plan(path)
    assert (plan.global_batch, plan.sequence, plan.optimizer) == (16, 12, "SGD")
    assert job_differences(plan, 12, "SGD") == job_differences(plan, None, None) == []
    sequence, optimizer = job_differences(plan, 64, "AdamW")
    assert "for sequences of 12 tokens, but the first batch has 64" in sequence
    assert "priced with SGD, but this job steps with AdamW" in optimizer
