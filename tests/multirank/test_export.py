"""`merak export` of a job's checkpoints gives what its `save_model` gives, whatever the layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import load
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

import merak
from merak.checkpoint.pretrained.dcp import export_dcp
from merak.checkpoint.pretrained.export import export_checkpoint
from merak.checkpoint.writing import without_group_warning
from merak.core.errors import WeightsError
from tests.multirank.ranks import RankPool
from tests.multirank.test_model_files import gpt2, mixtral
from tests.multirank.training import Layout, Texts
from tests.tiers import slow

MODELS = {"gpt2": gpt2, "mixtral": mixtral}


def train(kind: str, layout: Layout, zero: int, folder: str) -> float:
    """Train, and save the weights and their averages; the loss of the averages."""
    from tokenizers import Tokenizer, models

    merak.init(*layout, device="cpu")
    torch.manual_seed(0)
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    arguments = merak.MerakArguments(
        output_dir=folder,
        per_device_train_batch_size=2,
        max_steps=2,
        save_steps=2,
        learning_rate=0.05,
        zero=zero,
        ema_decay=0.5,
        ema_evaluation=True,
        per_device_eval_batch_size=4,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = merak.MerakTrainer(
        model=MODELS[kind](),
        args=arguments,
        train_dataset=Texts(16, padded=False),
        eval_dataset=Texts(8, padded=False),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=words, unk_token="a", pad_token="a"
        ),
    )
    trainer.train()
    trainer.save_model(folder)
    with merak.averaged_parameters(trainer.model):
        trainer.save_model(f"{folder}/averaged")
    return trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize(
    ("kind", "layout", "zero"),
    [
        ("gpt2", (2, 2, 1), 1),
        slow("mixtral", (1, 2, 2), 0),
    ],
)
def test_an_exported_checkpoint_is_the_saved_model(
    pool: RankPool, kind: str, layout: Layout, zero: int, tmp_path: Path
) -> None:
    losses = pool.run(train, 4, kind, layout, zero, str(tmp_path / "run"))
    found = export_checkpoint(tmp_path / "run" / "checkpoint-2", tmp_path / "out")
    beside = {"training_args.json", "checkpoint-2", "_merak", "averaged"}
    saved = {path.name for path in (tmp_path / "run").iterdir()}
    assert set(found.files) == saved - beside
    assert {"model.safetensors", "generation_config.json", "tokenizer.json"} <= saved
    for name in found.files:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "run" / name).read_bytes()
    export_dcp(tmp_path / "run" / "checkpoint-2", tmp_path / "dcp")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "run").state_dict()
    state = {key: torch.zeros_like(value) for key, value in expected.items()}
    with without_group_warning():
        load(state, checkpoint_id=tmp_path / "dcp")
    assert all(torch.equal(state[key], value) for key, value in expected.items())
    check_averages(kind, tmp_path, losses[0])


def check_averages(kind: str, folder: Path, loss: float) -> None:
    """Compare the averages that are exported with those that the job has saved, and their loss."""
    checkpoint, saved = folder / "run" / "checkpoint-2", folder / "run" / "averaged"
    model = AutoModelForCausalLM.from_pretrained(saved)
    now = AutoModelForCausalLM.from_pretrained(folder / "run").state_dict()
    assert not all(torch.equal(now[key], value) for key, value in model.state_dict().items())
    state = {key: torch.zeros_like(value) for key, value in model.state_dict().items()}
    export_dcp(checkpoint, folder / "dcp-average", average=True)
    with without_group_warning():
        load(state, checkpoint_id=folder / "dcp-average")
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    if kind == "mixtral":
        with pytest.raises(WeightsError, match=r"is converted where .* --format dcp"):
            export_checkpoint(checkpoint, folder / "average", average=True)
        return
    export_checkpoint(checkpoint, folder / "average", average=True)
    names = {path.name for path in saved.iterdir()} - {"training_args.json"}
    for name in names:
        assert (folder / "average" / name).read_bytes() == (saved / name).read_bytes()
    arguments = TrainingArguments(str(folder), report_to=[], use_cpu=True, disable_tqdm=True)
    trainer = Trainer(model, arguments, eval_dataset=Texts(8, padded=False))
    assert loss == pytest.approx(trainer.evaluate()["eval_loss"], rel=1e-5)
