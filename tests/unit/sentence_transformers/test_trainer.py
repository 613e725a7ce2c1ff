"""sentence-transformers' trainer before and around a training; jobs are in tests/multirank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import merak
from merak.core.errors import ArgumentsError, PackageError
from tests.multirank.sentence_jobs import encoder, pairs, save_words

package = pytest.importorskip("sentence_transformers")


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Any]:
    merak.init(device="cpu")
    return {"output_dir": str(tmp_path / "out"), "report_to": []}


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


def test_arguments_of_the_package_alone_are_refused(given: dict[str, Any], tmp_path: Path) -> None:
    save_words(str(tmp_path / "words"))
    args = package.SentenceTransformerTrainingArguments(**given)
    with pytest.raises(ArgumentsError, match=r"args is a SentenceTransformerTrainingArguments; "):
        merak.sentence_transformers.SentenceTransformerTrainer(
            encoder(str(tmp_path / "words")), args=args, train_dataset=pairs(4)
        )
