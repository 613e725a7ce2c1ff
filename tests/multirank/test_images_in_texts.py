"""Texts with images in between: the losses of transformers' Trainer, on ranks.

The images of a batch are rows of their own: a sample has none, one or two of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Trainer,
    TrainingArguments,
    set_seed,
)

import merak
from merak.cli.recipe.data.vision import with_images
from merak.core import mesh
from tests.multirank.ranks import RankPool
from tests.multirank.test_recipes import write_vision
from tests.multirank.training import Layout

VOCABULARY, IMAGE = 300, 299
LAYOUTS: tuple[Layout, ...] = ((2, 1, 1), (1, 2, 1), (1, 1, 2))
TEXT = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": VOCABULARY,
    "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def llava() -> PreTrainedModel:
    vision = CLIPVisionConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=2,
        image_size=32, patch_size=8,
    )  # fmt: skip
    text = LlamaConfig(**TEXT)
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE)
    )


def qwen() -> PreTrainedModel:
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 8,
        "out_hidden_size": 64, "window_size": 32, "fullatt_block_indexes": [1],
    }  # fmt: skip
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3]}
    config = Qwen2_5_VLConfig(
        vision_config=vision, text_config={**TEXT, "rope_parameters": rope},
        image_token_id=IMAGE, vision_start_token_id=297, vision_end_token_id=298,
    )  # fmt: skip
    return Qwen2_5_VLForConditionalGeneration(config)


MODELS = {"llava": llava, "qwen": qwen}
TOKENS = {"llava": 16, "qwen": 4}
"""Tokens of an image."""


def sample(kind: str, number: int) -> dict[str, Any]:
    """A text of 48 tokens with as many images as its number says: 1, 1, 2, 0, and again."""
    draws = torch.Generator().manual_seed(number)
    ids = torch.randint(3, 290, (48,), generator=draws)
    images = (1, 1, 2, 0)[number % 4]
    for image in range(images):
        start = 2 + image * (TOKENS[kind] + 3)
        ids[start : start + TOKENS[kind]] = IMAGE
    labels = torch.where(ids == IMAGE, 5, ids)
    shape = (images * 16, 3 * 2 * 8 * 8) if kind == "qwen" else (images, 3, 32, 32)
    found = {
        "input_ids": ids,
        "labels": labels,
        "pixel_values": torch.randn(shape, generator=draws),
    }
    if kind == "qwen":
        found["image_grid_thw"] = torch.tensor([1, 4, 4]).expand(images, 3)
    return found


def collate(rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    texts = ("input_ids", "labels")
    return {
        name: (torch.stack if name in texts else torch.cat)([row[name] for row in rows])
        for name in rows[0]
    }


def arguments(folder: str, steps: int) -> dict[str, Any]:
    """Arguments of steps of four samples, two in a batch, in the order of the data."""
    return {
        "output_dir": folder, "max_steps": 3, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": steps, "save_strategy": "no", "report_to": [],
        "logging_steps": 1, "disable_tqdm": True, "use_cpu": True, "learning_rate": 0.01,
        "train_sampling_strategy": "sequential",
    }  # fmt: skip


def losses(trainer: Any) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def on_ranks(kind: str, folder: str) -> list[list[float]]:
    found = []
    for dp, tp, pp in LAYOUTS:
        mesh.reset()
        merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
        set_seed(0)
        data: Any = [sample(kind, number) for number in range(16)]
        args = merak.MerakArguments(**arguments(folder, 2 // dp))
        trainer = merak.MerakTrainer(MODELS[kind](), args, collate, train_dataset=data)
        found.append(losses(trainer))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_as_in_one_process(kind: str, pool: RankPool, tmp_path: Path) -> None:
    set_seed(0)
    data: Any = [sample(kind, number) for number in range(16)]
    args = TrainingArguments(**arguments(str(tmp_path), 2))
    expected = losses(Trainer(MODELS[kind](), args, collate, train_dataset=data))
    for found in pool.run(on_ranks, 2, kind, str(tmp_path)):
        for layout, ours in zip(LAYOUTS, found, strict=True):
            assert ours == pytest.approx(expected, rel=1e-4), layout


def talk(trl: Any, folder: str) -> list[tuple[float, float]]:
    """Losses and accuracies of TRL's trainer, or of Merak's, on conversations with images.

    Args:
        trl: module of the trainer.
        folder: with what `write_vision` has written.
    """
    records = datasets.load_dataset("json", data_files=f"{folder}/seen.jsonl", split="train")
    own = {"bf16": False, "assistant_only_loss": True, "activation_checkpointing": False}
    args = trl.SFTConfig(**arguments(folder, 2), **own)
    data = with_images(records, (Path(folder, "seen.jsonl"),))
    trainer = trl.SFTTrainer(f"{folder}/model", args, train_dataset=data)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [(entry["loss"], entry["mean_token_accuracy"]) for entry in logs]


def talk_on_ranks(folder: str) -> list[list[tuple[float, float]]]:
    import merak.trl

    found = []
    for dp, tp, pp in LAYOUTS[1:]:
        mesh.reset()
        merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
        found.append(talk(merak.trl, folder))
    return found


@pytest.mark.slow
def test_conversations_as_with_trl(pool: RankPool, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    write_vision(tmp_path)
    expected = talk(trl, str(tmp_path))
    for found in pool.run(talk_on_ranks, 2, str(tmp_path)):
        for layout, ours in zip(LAYOUTS[1:], found, strict=True):
            for one, other in zip(ours, expected, strict=True):
                assert one == pytest.approx(other, rel=1e-4), layout
