"""sentence-transformers' trainer before and around a training; jobs are in tests/multirank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

import merak
from merak.core.errors import ArgumentsError, DataError, PackageError
from tests.multirank.sentence_jobs import encoder, judged, loss_of, pairs, save_words

package = pytest.importorskip("sentence_transformers")


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Any]:
    merak.init(device="cpu")
    return {"output_dir": str(tmp_path / "out"), "report_to": []}


@pytest.fixture
def model(tmp_path: Path) -> Any:
    save_words(str(tmp_path / "words"))
    return encoder(str(tmp_path / "words"))


def test_names_are_those_of_the_package() -> None:
    for name in merak.sentence_transformers.__all__:
        assert issubclass(getattr(merak.sentence_transformers, name), getattr(package, name))
    with pytest.raises(AttributeError, match=r"has no attribute 'nonsense'"):
        _ = merak.sentence_transformers.nonsense


def test_it_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("merak.core.packages.find_spec", lambda name: None)
    with pytest.raises(PackageError, match=r"'merak-train\[sentence_transformers\]'"):
        _ = merak.sentence_transformers.SentenceTransformerTrainer


def test_defaults_are_those_of_the_package(given: dict[str, Any]) -> None:
    args = merak.sentence_transformers.SentenceTransformerTrainingArguments(**given, zero=1)
    theirs = package.SentenceTransformerTrainingArguments(**given)
    for name in ("learning_rate", "batch_sampler", "prompts", "prediction_loss_only"):
        assert getattr(args, name) == getattr(theirs, name)
    assert args.zero == 1


def test_arguments_of_the_package_alone_are_refused(given: dict[str, Any], model: Any) -> None:
    args = package.SentenceTransformerTrainingArguments(**given)
    with pytest.raises(ArgumentsError, match=r"args is a SentenceTransformerTrainingArguments; "):
        merak.sentence_transformers.SentenceTransformerTrainer(
            model, args=args, train_dataset=pairs(4)
        )


@pytest.mark.parametrize("auto", [{"plan": "auto"}, {"per_device_train_batch_size": "auto"}])
def test_negatives_are_of_a_microbatch_that_is_given(
    auto: dict[str, Any], given: dict[str, Any], model: Any
) -> None:
    own = merak.sentence_transformers
    args = own.SentenceTransformerTrainingArguments(**given, global_batch=8, **auto)
    with pytest.raises(ArgumentsError, match="'auto' would choose the samples of a microbatch"):
        own.SentenceTransformerTrainer(model, args=args, train_dataset=pairs(4))


def test_modules_of_a_loss_are_in_checkpoints_and_in_no_model_file(
    given: dict[str, Any], model: Any
) -> None:
    words = model.tokenizer.name_or_path
    args = merak.sentence_transformers.SentenceTransformerTrainingArguments(
        **given, max_steps=2, save_steps=1, learning_rate=0.1, per_device_train_batch_size=2
    )

    def trainer() -> Any:
        own = encoder(words)
        loss = loss_of("SoftmaxLoss", own, embedding_dimension=32, num_labels=2)
        return merak.sentence_transformers.SentenceTransformerTrainer(
            own, args, train_dataset=judged(8), loss=loss
        )

    whole, resumed = trainer(), trainer()
    initial = resumed.loss.classifier.weight.clone()
    whole.train()
    folder = Path(args.output_dir) / "checkpoint-1"
    with safe_open(folder / "model.safetensors", "pt") as file:
        keys = set(file.keys())
    assert keys and all(key.startswith(("embeddings.", "encoder.", "pooler.")) for key in keys)
    assert whole.gather_state_dict().keys() == model.state_dict().keys()
    resumed.train(resume_from_checkpoint=str(folder))
    torch.testing.assert_close(resumed.loss.classifier.weight, whole.loss.classifier.weight)
    assert not torch.equal(resumed.loss.classifier.weight, initial)
    for name, parameter in whole.model.state_dict().items():
        torch.testing.assert_close(resumed.model.state_dict()[name], parameter)


def test_a_parameter_outside_of_modules_is_refused(given: dict[str, Any], model: Any) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.scale = model, nn.Parameter(torch.ones(()))

    args = merak.sentence_transformers.SentenceTransformerTrainingArguments(**given)
    with pytest.raises(ArgumentsError, match=r"Scaled has a parameter 'scale' of its own"):
        merak.sentence_transformers.SentenceTransformerTrainer(
            model, args, train_dataset=pairs(4), loss=Scaled()
        )


def test_rows_of_other_replicas_need_equal_batches(given: dict[str, Any], model: Any) -> None:
    args = merak.sentence_transformers.SentenceTransformerTrainingArguments(**given)
    loss = loss_of("MultipleNegativesRankingLoss", model, gather_across_devices=True)
    trainer = merak.sentence_transformers.SentenceTransformerTrainer(
        model, args, train_dataset={"one": pairs(4), "two": pairs(4)}, loss=loss
    )
    with pytest.raises(DataError, match="there are several; train with one dataset"):
        trainer._refuse_other_batches()
    trainer.train_dataset = pairs(4)
    with pytest.raises(DataError, match="set dataloader_drop_last=True"):
        trainer._refuse_other_batches()
    args.dataloader_drop_last = True
    trainer._refuse_other_batches()
