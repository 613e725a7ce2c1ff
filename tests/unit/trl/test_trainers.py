"""What TRL's trainers refuse here, before they prepare anything; jobs are in tests/multirank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset  # type: ignore[import-untyped]
from safetensors import safe_open

import merak
from merak.core.errors import ArgumentsError, PackageError
from tests.multirank.trl_jobs import language_model, pairs, tokenizer

trl = pytest.importorskip("trl")


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Any]:
    merak.init(device="cpu")
    return {
        "output_dir": str(tmp_path), "bf16": False, "activation_checkpointing": False,
        "report_to": [],
    }  # fmt: skip


def test_names_are_those_of_trl() -> None:
    for name in merak.trl.__all__:
        assert issubclass(getattr(merak.trl, name), getattr(trl, name))
    with pytest.raises(AttributeError, match=r"merak\.trl' has no attribute 'nonsense'"):
        _ = merak.trl.nonsense


def test_trl_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("merak.core.packages.find_spec", lambda name: None)
    with pytest.raises(PackageError, match=r"trl\.SFTTrainer needs trl, .* 'merak-train\[trl"):
        _ = merak.trl.SFTTrainer


def test_defaults_are_those_of_trl(given: dict[str, Any]) -> None:
    args = merak.trl.DPOConfig(**given, zero=1)
    theirs = trl.DPOConfig(**given)
    for name in ("learning_rate", "logging_steps", "beta", "max_length", "disable_dropout"):
        assert getattr(args, name) == getattr(theirs, name)
    assert args.zero == 1 and args.schedule == merak.MerakArguments.schedule


def test_arguments_of_trl_alone_are_refused(given: dict[str, Any]) -> None:
    data = Dataset.from_dict({"text": ["a"]})
    for args, kind in ((trl.SFTConfig(**given), "a SFTConfig"), (None, "nothing")):
        with pytest.raises(ArgumentsError, match=rf"args is {kind}; .* merak\.trl\.SFTConfig"):
            merak.trl.SFTTrainer(language_model(), args=args, train_dataset=data)


def test_offloading_by_autograd_is_refused(given: dict[str, Any]) -> None:
    args = merak.trl.SFTConfig(**given, activation_offloading=True)
    with pytest.raises(ArgumentsError, match=r"use offload_activations"):
        merak.trl.SFTTrainer(language_model(), args=args, train_dataset=pairs(1))


@pytest.mark.slow
def test_a_reference_is_in_checkpoints_and_in_no_model_file(given: dict[str, Any]) -> None:
    given |= {"sync_ref_model": True, "ref_model_sync_steps": 1, "learning_rate": 0.1}
    args = merak.trl.DPOConfig(**given, max_steps=2, save_steps=1, pad_to_multiple_of=24)

    def trainer() -> Any:
        rest = {"args": args, "train_dataset": pairs(16), "processing_class": tokenizer()}
        return merak.trl.DPOTrainer(language_model(), language_model(), **rest)

    alone = language_model()  # whose seed no trainer sees
    initial = dict(alone.named_parameters())
    per_token = 6 * alone.num_parameters(exclude_embeddings=True)
    whole, resumed = trainer(), trainer()
    whole.train()
    assert whole._flops_per_token == per_token > 0
    assert whole.gather_state_dict().keys() == initial.keys()
    folder = Path(args.output_dir) / "checkpoint-1"
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert set(file.keys()) <= set(initial)
    resumed.train(resume_from_checkpoint=str(folder))
    found, expected = (dict(one.model.named_parameters()) for one in (resumed, whole))
    for name, parameter in expected.items():
        torch.testing.assert_close(found[name], parameter)
        assert not torch.equal(parameter, initial[name.removeprefix("reference.module.")])
