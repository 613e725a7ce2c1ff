"""Values of training arguments that make no sense: one sentence each, by kind, range and choice."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from merak.arguments import MerakArguments
from merak.arguments.draft import DraftArguments
from merak.arguments.folders import make_output_folder
from merak.arguments.kinds import OWN_CHECKS
from merak.arguments.ranges import RANGES
from merak.arguments.rules import Policy
from merak.arguments.table import RULES
from merak.core import mesh as meshes
from merak.core.errors import ArgumentsError


@pytest.fixture(autouse=True)
def job() -> Iterator[None]:
    meshes.reset()
    meshes.set_mesh(meshes.Mesh(1, 1, 1, 0, torch.device("cpu"), None))
    yield
    meshes.reset()


def arguments(**settings: Any) -> MerakArguments:
    return MerakArguments(**{"output_dir": "unused", **settings})


HONOURED = [
    field.name
    for field in dataclasses.fields(MerakArguments)
    if field.init and field.name not in OWN_CHECKS
    and getattr(RULES.get(field.name), "policy", None) is not Policy.REFUSED
]  # fmt: skip


@pytest.mark.parametrize("name", HONOURED)
def test_no_field_takes_an_object_of_another_kind(name: str) -> None:
    with pytest.raises(ArgumentsError, match=rf"^{name}=\{{1\}} should be .*\.$"):
        arguments(**{name: {1}})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_steps": "three"}, "max_steps='three' should be a whole number."),
        ({"max_steps": 2.5}, "max_steps=2.5 should be a whole number."),
        ({"max_steps": True}, "max_steps=True should be a whole number."),
        ({"learning_rate": "1e-4"}, "learning_rate='1e-4' should be a number."),
        ({"bf16": "false"}, "bf16='false' should be True or False or None."),
        ({"partition": "3 4"}, "partition='3 4' should be a list of whole numbers or None."),
        ({"partition": [3, "4"]}, "partition=[3, '4'] should be a list of whole numbers or None."),
        ({"per_device_train_batch_size": -1}, "=-1 is out of range; use a whole number of 1 or"),
        ({"gradient_accumulation_steps": 0}, "=0 is out of range; use a whole number of 1 or more"),
        ({"dataloader_num_workers": -2}, "=-2 is out of range; use a whole number of 0 or more."),
        ({"learning_rate": float("nan")}, "learning_rate=nan is out of range; use a finite"),
        ({"seed": 2**40}, "use a whole number from 0 to 4294967295."),
        ({"adam_beta1": 1.0}, "adam_beta1=1.0 is out of range; use a number of 0 or more"),
        ({"lr_scheduler_type": "cosin"}, "='cosin' is not a choice; did you mean cosine?"),
        ({"save_strategy": "never"}, "use 'no' or 'steps' or 'epoch' or 'best'."),
        ({"sub_pipelining": "maybe"}, "='maybe' is not a choice; use 'auto' or 'on' or 'off'."),
        ({"include_num_input_tokens_seen": "some"}, "use 'all' or 'non_padding' or 'no'."),
        ({"logging_steps": 0}, "these arguments do not go together: logging strategy"),
        ({"fp16": True, "bf16": True}, "At most one of fp16 and bf16 can be True, but not both."),
        ({"accelerator_config": {"x": 1}}, "these arguments do not go together: "),
        ({"dataloader_persistent_workers": True}, "but dataloader_num_workers=0; set that to 1 or"),
        ({"report_to": "tensorbord"}, "is no logger of transformers; did you mean tensorboard?"),
    ],
)  # fmt: skip
def test_what_is_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ArgumentsError) as caught:
        arguments(**settings)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_steps": np.int64(3), "learning_rate": np.float32(1e-3), "warmup_steps": 3},
        {"bf16": 0, "resume_from_checkpoint": True, "report_to": []},
        {"output_dir": Path("unused"), "segment_times": None, "recompute": 0.5},
        {"report_to": None, "logging_steps": 0.1, "eval_strategy": "no", "save_steps": 0},
        {"partition": (3,), "label_names": ["labels"], "include_num_input_tokens_seen": True},
    ],
)
def test_what_is_taken(settings: dict[str, object]) -> None:
    arguments(**settings)


def test_settled_arguments_are_taken_again() -> None:
    args = arguments(lr_scheduler_kwargs={"a": 1}, report_to="none", accelerator_config={})
    assert dataclasses.replace(args, max_steps=3).max_steps == 3


def test_a_step_keeps_its_samples_where_fewer_replicas_are_there() -> None:
    smaller = meshes.Mesh(2, 1, 1, 0, torch.device("cpu"), None, wanted_dp=4)
    meshes.set_mesh(smaller)
    args = arguments(gradient_accumulation_steps=3)
    assert args.gradient_accumulation_steps == 6
    assert args.train_batch_size * args.world_size * 6 == 8 * 4 * 3
    assert dataclasses.replace(args, max_steps=3).gradient_accumulation_steps == 6
    assert MerakArguments(**dataclasses.asdict(args)).gradient_accumulation_steps == 6
    meshes.set_mesh(dataclasses.replace(smaller, dp=3))
    with pytest.raises(ArgumentsError, match=r"=2 × dp=4 = 8 microbatches .* the 3 replicas that"):
        arguments(gradient_accumulation_steps=2)
    assert arguments(gradient_accumulation_steps=3).gradient_accumulation_steps == 4


def test_ranges_are_of_fields() -> None:
    assert set(RANGES) <= {field.name for field in dataclasses.fields(MerakArguments)}


def test_a_logger_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "transformers.integrations.integration_utils.is_wandb_available", lambda: False
    )
    with pytest.raises(ArgumentsError, match="needs the package wandb, which is not installed; ru"):
        arguments(report_to=["wandb"])


def test_an_output_folder_inside_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ArgumentsError, match=r"cannot be a folder, since .*file is a file; name"):
        arguments(output_dir=str(tmp_path / "file" / "run"))
    with pytest.raises(ArgumentsError, match=r"cannot be written \(Not a directory\); name"):
        make_output_folder(str(tmp_path / "file" / "run"))


def test_an_output_folder_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as if this were not root
    with pytest.raises(ArgumentsError, match=r"since .* is not yours to write into; name another"):
        arguments(output_dir=str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_draft_touches_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def touch(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("merak.arguments.training.fresh_state", touch)
    monkeypatch.setattr("merak.arguments.training.check_autocast", touch)
    meshes.set_mesh(meshes.Mesh(2, 1, 1, 0, torch.device("cuda"), None))
    assert DraftArguments(output_dir="unused").device.type == "cuda"
    with pytest.raises(ArgumentsError, match="max_steps='three' should be a whole number"):
        DraftArguments(output_dir="unused", max_steps="three")  # type: ignore[arg-type]
