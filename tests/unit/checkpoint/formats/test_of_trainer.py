"""Checkpoints of transformers' own Trainer: what is resumed from, and what is refused and why."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.trainer
from torch import nn

import merak
from merak.checkpoint.pretrained import trainer_files
from merak.core import mesh
from merak.core.errors import MerakError
from merak.trainer.checkpoints.resuming import checkpoint_to_resume
from tests.multirank.training import alone


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    mesh.reset()
    merak.init(device="cpu")
    yield
    mesh.reset()


def model() -> nn.Module:
    torch.manual_seed(3)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=8,
        bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def settings(folder: Path) -> dict[str, Any]:
    ids = torch.arange(8)
    return {
        "data": [{"input_ids": ids, "labels": ids} for _ in range(8)],
        "arguments": {
            "output_dir": str(folder), "max_steps": 2, "save_steps": 1, "report_to": "none",
            "disable_tqdm": True, "per_device_train_batch_size": 2, "use_cpu": True,
            "weight_decay": 0.1, "logging_steps": 1,
        },
    }  # fmt: skip


def theirs(folder: Path, **further: Any) -> transformers.Trainer:
    of = settings(folder)
    args = transformers.TrainingArguments(**of["arguments"] | further)
    return transformers.Trainer(model=model(), args=args, train_dataset=of["data"])


def ours(folder: Path, built: nn.Module | None = None, **kwargs: Any) -> merak.MerakTrainer:
    of = settings(folder)
    args = merak.MerakArguments(trace_cache="", **of["arguments"])
    data = of["data"]
    return merak.MerakTrainer(model=built or model(), args=args, train_dataset=data, **kwargs)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> transformers.Trainer:
    """A trainer of transformers after two steps, each of which has a checkpoint."""
    with alone():
        trainer = theirs(tmp_path_factory.mktemp("theirs"))
        trainer.train()
    return trainer


@pytest.fixture
def job(whole: transformers.Trainer, tmp_path: Path) -> Path:
    """The job's folder with the checkpoint of its first step, to be changed."""
    source = Path(str(whole.args.output_dir)) / "checkpoint-1"
    shutil.copytree(source, tmp_path / "job" / "checkpoint-1")
    return tmp_path / "job"


def losses(trainer: Any) -> list[float]:
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def refusal(job: Path, trainer: merak.MerakTrainer | None = None) -> str:
    with pytest.raises(MerakError) as caught:
        (trainer or ours(job)).train(resume_from_checkpoint=str(job / "checkpoint-1"))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_it_is_gone_on_from(whole: transformers.Trainer, job: Path) -> None:
    trainer = ours(job)
    trainer.train(resume_from_checkpoint=True)
    assert losses(trainer) == pytest.approx(losses(whole), rel=1e-6)
    state, reference = trainer.gather_state_dict(), whole.model.state_dict()  # type: ignore[union-attr]
    for name, tensor in reference.items():
        torch.testing.assert_close(state[name], tensor, atol=1e-6, rtol=0)


class OwnGroups(merak.MerakTrainer):
    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        assert self.model is not None
        named = list(self.model.named_parameters())
        first = [parameter for name, parameter in named if "h.0." in name]
        rest = [parameter for name, parameter in named if "h.0." not in name]
        self.optimizer = torch.optim.AdamW([{"params": first}, {"params": rest}], lr=1e-3)
        return self.optimizer


def test_another_optimizer_is_refused(job: Path) -> None:
    of = settings(job)
    args = merak.MerakArguments(trace_cache="", **of["arguments"])
    trainer = OwnGroups(model=model(), args=args, train_dataset=of["data"])
    found = refusal(job, trainer)
    assert "optimizer.pt has groups of" in found
    assert "resume with the same trainable parameters and the same groups" in found


def test_other_trainable_parameters_are_refused(job: Path) -> None:
    frozen = model()
    next(frozen.parameters()).requires_grad_(False)
    assert "resume with the same trainable parameters" in refusal(job, ours(job, frozen))


def test_states_of_other_shapes_are_refused(job: Path) -> None:
    file = job / "checkpoint-1" / "optimizer.pt"
    content = torch.load(file, weights_only=True)
    content["state"][0]["exp_avg"] = torch.zeros(3, 3)
    torch.save(content, file)
    found = refusal(job)
    assert "exp_avg of transformer.wte.weight has shape (3, 3) in" in found
    assert "and the parameter has (32, 16)" in found


def test_another_model_is_refused(job: Path) -> None:
    config = model().config  # type: ignore[union-attr]
    shorter = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**config.to_dict() | {"n_layer": 1})
    )
    assert "is a checkpoint of another model: it has transformer.h.1." in refusal(
        job, ours(job, shorter)
    )


def test_weights_alone_are_no_training_to_go_on_with(job: Path) -> None:
    (job / "checkpoint-1" / "optimizer.pt").unlink()
    assert "was saved without an optimizer, so no training can go on from it" in refusal(job)


def test_one_that_is_damaged_is_passed_over(whole: transformers.Trainer, job: Path) -> None:
    later = Path(str(whole.args.output_dir)) / "checkpoint-2"
    shutil.copytree(later, job / "checkpoint-2")
    file = job / "checkpoint-2" / "optimizer.pt"
    file.write_bytes(file.read_bytes()[:1000])
    assert checkpoint_to_resume(True, str(job)) == str(job / "checkpoint-1")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("adapter_model.safetensors", "it holds adapters alone"),
        ("pytorch_model_fsdp_0/x", "it was saved under FSDP"),
        ("global_step1/x", "it was saved under DeepSpeed"),
        ("pytorch_model.bin", "its weights are no safetensors files"),
    ],
)
def test_other_kinds_are_refused_by_name(job: Path, name: str, reason: str) -> None:
    (job / "checkpoint-1" / name).parent.mkdir(exist_ok=True)
    (job / "checkpoint-1" / name).touch()
    assert refusal(job) == (
        f"{job / 'checkpoint-1'} was written by transformers' Trainer, and {reason}, so no "
        "training can go on from it here; load its weights (from_pretrained) and start a new "
        "training."
    )


class Touch:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt"])
def test_files_of_torch_run_no_code(job: Path, name: str) -> None:
    marker = job / "the code has run"
    torch.save(Touch(marker), job / "checkpoint-1" / name)
    assert "checkpoint-1 is damaged (Weights only load failed" in refusal(job)
    (job / "checkpoint-1" / name).write_bytes(pickle.dumps(Touch(marker)))
    assert "checkpoint-1 is damaged" in refusal(job)
    assert not marker.exists()


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"global_step": "1"}', "[" * 100_000])
def test_a_state_that_is_none_is_damage(job: Path, text: str | None) -> None:
    state = job / "checkpoint-1" / "trainer_state.json"
    state.unlink()
    if text is None:
        os.mkfifo(state)  # which is not waited for
    else:
        state.write_text(text)
    assert "checkpoint-1 is damaged (" in refusal(job)


def test_other_files_are_not_looked_at(job: Path) -> None:
    marker = job / "the code has run"
    for name in ("training_args.bin", "rng_state.pth"):
        torch.save(Touch(marker), job / "checkpoint-1" / name)
    assert ours(job).train(resume_from_checkpoint=True).global_step == 2
    assert not marker.exists()


def test_names_of_files_are_those_of_transformers() -> None:
    names = [name for name in vars(trainer_files) if name.isupper()]
    assert names
    for name in names:
        assert getattr(trainer_files, name) == getattr(transformers.trainer, name)
