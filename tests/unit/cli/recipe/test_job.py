"""`merak train`: models trained from recipes, loaded again with transformers alone."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import datasets
import pytest
import torch
import transformers
import yaml

from merak.cli.main import main
from merak.cli.recipe.job import Job, _to_resume
from merak.core import mesh

WORDS = ["one ring to rule them all", "one ring to find them", "in the land of shadows"] * 16
GPT2 = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16}
BERT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}
VIT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 8,
    "patch_size": 4,
    "num_labels": 3,
}


@pytest.fixture(autouse=True)
def mesh_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MERAK_CACHE", str(tmp_path / "cache"))
    mesh.reset()
    yield
    mesh.reset()


@pytest.fixture
def texts(tmp_path: Path) -> str:
    """A folder of small texts."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, text in enumerate(WORDS):
        (folder / f"{number:02}.txt").write_text(text, encoding="utf-8")
    return str(folder)


def recipe(tmp_path: Path, model: dict[str, Any], data: dict[str, Any], **arguments: Any) -> Path:
    """Write a recipe of a short run; most arguments are for quiet."""
    fixed = {
        "output_dir": str(tmp_path / "out"),
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "per_device_eval_batch_size": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    tmp_path.mkdir(exist_ok=True)
    written = {"model": model, "data": data, "arguments": {**fixed, **arguments}}
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(written), encoding="utf-8")
    return file


def train(file: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["train", str(file), "--json", "--device", "cpu"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def eval_loss(model: torch.nn.Module, rows: datasets.Dataset, tmp_path: Path) -> float:
    """The loss as transformers' own trainer evaluates it, in batches of two as the recipes."""
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path / "one"),
        per_device_eval_batch_size=2,
        use_cpu=True,
        disable_tqdm=True,
    )
    metrics = transformers.Trainer(model=model, args=args).evaluate(rows)
    return float(metrics["eval_loss"])


def test_causal_model_on_text(
    tmp_path: Path, texts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {"source": texts, "vocabulary": 300, "sequence": 8, "held_out": 0.25}
    file = recipe(tmp_path, {"name": "GPT2LMHeadModel", "config": GPT2}, data)
    report = train(file, capsys)
    assert report["steps"] == 3
    assert report["tokens_per_second"] * report["seconds"] == pytest.approx(3 * 2 * 2 * 8)
    assert report["checkpoint"] == str(tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(report["checkpoint"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(report["checkpoint"])
    assert isinstance(model, transformers.GPT2LMHeadModel)
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    (packed,) = (tmp_path / "out" / "data").glob("packed-*/held_out")
    rows = datasets.load_from_disk(str(packed))
    assert report["eval_loss"] == pytest.approx(eval_loss(model, rows, tmp_path), rel=1e-5)


def test_masked_model_on_text(
    tmp_path: Path, texts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {"source": texts, "vocabulary": 300, "sequence": 64, "held_out": 0}
    model = {"name": "BertForMaskedLM", "config": BERT}
    report = train(recipe(tmp_path, model, data, gradient_accumulation_steps=1), capsys)
    assert report["steps"] == 3 and report["eval_loss"] is None
    # Untrained, all words are about equally likely.
    vocabulary = transformers.AutoConfig.from_pretrained(report["checkpoint"]).vocab_size
    assert report["loss"] == pytest.approx(math.log(vocabulary), abs=0.5)
    transformers.BertForMaskedLM.from_pretrained(report["checkpoint"])


def test_starts_from_weights_and_keeps_a_datasets_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**VIT))
    model.save_pretrained(tmp_path / "model")
    pixels = torch.randn(10, 3, 8, 8)
    columns = {"pixel_values": pixels.tolist(), "labels": [i % 3 for i in range(10)]}
    splits = datasets.Dataset.from_dict(columns).train_test_split(0.4, seed=1)
    splits.save_to_disk(str(tmp_path / "images"))
    file = recipe(
        tmp_path,
        {"name": str(tmp_path / "model")},
        {"source": str(tmp_path / "images")},
        learning_rate=0.0,
    )
    report = train(file, capsys)
    expected = eval_loss(model, splits["test"], tmp_path)
    assert report["eval_loss"] == pytest.approx(expected, rel=1e-5)
    assert report["tokens_per_second"] is None  # pixels are no tokens
    trained = transformers.ViTForImageClassification.from_pretrained(report["checkpoint"])
    for name, parameter in model.named_parameters():
        assert torch.equal(trained.get_parameter(name), parameter), name


@pytest.mark.parametrize(
    ("model", "data", "said"),
    [
        (
            {"name": "BertForSequenceClassification", "config": BERT},
            {},
            "neither to continue text nor to fill gaps",
        ),
        (
            {"name": "BertForMaskedLM", "config": BERT},
            {"packing": "separate", "sequence": 64},
            "data.packing='separate' cannot be kept by BertForMaskedLM",
        ),
        (
            {"name": "GPT2LMHeadModel", "config": {**GPT2, "vocab_size": 50}},
            {"vocabulary": 300, "sequence": 8},
            "entries, but GPT2LMHeadModel has vocab_size=50; leave model.config.vocab_size out",
        ),
        (
            {"name": "GPT2LMHeadModel", "config": GPT2},
            {"vocabulary": 300, "sequence": 17},
            "data.sequence=17 is more than the 16 positions of GPT2LMHeadModel",
        ),
    ],
)
def test_what_does_not_fit(
    model: dict[str, Any],
    data: dict[str, Any],
    said: str,
    texts: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = recipe(tmp_path, model, {"source": texts, "held_out": 0, **data})
    assert main(["train", str(file), "--device", "cpu"]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert not list(tmp_path.glob("out/*.safetensors"))


def test_a_dataset_without_text_or_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    datasets.Dataset.from_dict({"words": WORDS}).save_to_disk(str(tmp_path / "rows"))
    data = {"source": str(tmp_path / "rows"), "vocabulary": 300, "sequence": 8}
    file = recipe(tmp_path, {"name": "GPT2LMHeadModel", "config": GPT2}, data)
    assert main(["train", str(file), "--device", "cpu"]) == 2
    assert "has the columns words; GPT2LMHeadModel takes input_ids" in capsys.readouterr().err
    mesh.reset()
    data["column"] = "words"
    train(recipe(tmp_path, {"name": "GPT2LMHeadModel", "config": GPT2}, data), capsys)


@pytest.mark.slow
def test_two_ranks_give_what_one_gives(
    tmp_path: Path, texts: str, capfd: pytest.CaptureFixture[str]
) -> None:
    data = {"source": texts, "vocabulary": 300, "sequence": 8, "held_out": 0.25}
    losses = []
    for pp in (1, 2):
        model = {"name": "GPT2LMHeadModel", "config": GPT2}
        file = recipe(tmp_path / str(pp), model, data, max_grad_norm=0.0)
        with file.open("a", encoding="utf-8") as more:
            more.write(f"parallel: {{pp: {pp}}}\n")
        assert main(["train", str(file), "--json", "--device", "cpu"]) == 0
        report = json.loads(capfd.readouterr().out)
        losses.append((report["loss"], report["eval_loss"], report["steps"]))
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("resumes", "requested", "restarts", "has_any", "expected"),
    [
        (False, None, "0", True, None),
        (False, "given", "1", True, "given"),
        (True, None, "0", True, "auto"),
        (True, None, "0", False, None),
        (True, "given", "0", True, "given"),
        (True, "given", "1", True, "auto"),
        (True, "given", "1", False, "given"),
    ],
)
def test_a_restart_goes_on_from_what_the_run_has_saved(
    resumes: bool,
    requested: str | None,
    restarts: str,
    has_any: bool,
    expected: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    if has_any:
        (tmp_path / "checkpoint-3").mkdir()
    args = SimpleNamespace(
        resume_from_checkpoint=requested, output_dir=str(tmp_path), checkpoint_url=None
    )
    assert _to_resume(Job(cast(Any, None), None, None, resumes), args) == expected
