"""Detectors of transformers, unmodified: labels of any sizes, a matching by values, their loss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import Dataset, Subset
from transformers.loss import loss_for_object_detection

import merak
from merak.core import mesh as meshes
from tests.multirank.ranks import RankPool
from tests.tiers import slow

SIZE, CLASSES, BATCH, NUM_MICROBATCHES, NUM_STEPS, EVALUATED = 64, 5, 4, 2, 3, 8
"""Sides of images; classes; samples of a microbatch of all replicas; …; samples evaluated."""


def yolos() -> nn.Module:
    return transformers.YolosForObjectDetection(
        transformers.YolosConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
            image_size=[SIZE, SIZE], patch_size=16, num_detection_tokens=6, num_labels=CLASSES,
            use_mid_position_embeddings=False,
        )
    )  # fmt: skip


def detr() -> nn.Module:
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=["stage4"],
    )  # fmt: skip
    config = transformers.DetrConfig(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_queries=6,
        num_labels=CLASSES, dropout=0.0, auxiliary_loss=True, backbone_config=backbone,
        use_timm_backbone=False, use_pretrained_backbone=False,
    )  # fmt: skip
    return transformers.DetrForObjectDetection(config)


class Images(Dataset[Any]):
    """Images with one to four boxes."""

    def __len__(self) -> int:
        return BATCH * NUM_MICROBATCHES * NUM_STEPS

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator, number = torch.Generator().manual_seed(index), 1 + index % 4
        return {
            "pixel_values": torch.rand(3, SIZE, SIZE, generator=generator),
            "labels": {
                "class_labels": torch.randint(CLASSES, (number,), generator=generator),
                "boxes": 0.2 + 0.4 * torch.rand(number, 4, generator=generator),
            },
        }


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    pixels = torch.stack([sample["pixel_values"] for sample in samples])
    return {"pixel_values": pixels, "labels": [sample["labels"] for sample in samples]}


Trained = tuple[list[float], float, list[tuple[int, float]], dict[str, torch.Tensor]]
"""Losses of steps and of an evaluation, its labels, and on rank 0 the weights."""


def made(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


def train(build: Callable[[], nn.Module], folder: str, dp: int = 1) -> Trained:
    """Train with transformers' trainer, or Merak's where there is a mesh."""
    is_own = meshes.has_mesh()
    kind: Any = merak.MerakTrainer if is_own else transformers.Trainer
    args = (merak.MerakArguments if is_own else transformers.TrainingArguments)(
        folder, max_steps=NUM_STEPS, gradient_accumulation_steps=NUM_MICROBATCHES, optim="sgd",
        logging_steps=1, per_device_train_batch_size=BATCH // dp, learning_rate=0.05,
        per_device_eval_batch_size=BATCH // dp, lr_scheduler_type="constant", report_to=[],
        max_grad_norm=0.0, train_sampling_strategy="sequential", remove_unused_columns=False,
        dataloader_drop_last=True, save_strategy="no", use_cpu=True, disable_tqdm=True,
        eval_do_concat_batches=False, log_level="error",
    )  # fmt: skip
    labels: list[tuple[int, float]] = []

    def metrics(predicted: Any) -> dict[str, float]:
        for label in (one for batch in predicted.label_ids for one in batch):
            labels.append((len(label["boxes"]), float(label["boxes"].sum())))
        return {}

    trainer = kind(
        made(build), args, data_collator=collate, compute_metrics=metrics,
        train_dataset=Images(), eval_dataset=Subset(Images(), range(EVALUATED)),
    )  # fmt: skip
    trainer.train()
    evaluated = trainer.evaluate()["eval_loss"]
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    weights = trainer.gather_state_dict() if is_own else trainer.model.state_dict()
    return losses, evaluated, labels, weights


def trained(
    layouts: list[tuple[Callable[[], nn.Module], dict[str, int]]], at: str
) -> list[Trained]:
    found = []
    for number, (build, degrees) in enumerate(layouts):
        meshes.reset()
        merak.init(device="cpu", **degrees)
        found.append(train(build, f"{at}/{number}", degrees.get("dp", 1)))
    return found


def replicas(build: Callable[[], nn.Module], dp: int) -> Trained:
    """One process whose losses are divided as transformers does in a job of replicas.

    Its mean number of boxes is that of all replicas, which it divides by their number once more.
    """
    transformers.TrainingArguments("", use_cpu=True, report_to=[])  # without which it counts alone
    model, data, size = made(build).train(), Images(), BATCH // dp
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []

    def batches(first: int) -> list[dict[str, Any]]:
        rows = [range(first + r * size, first + (r + 1) * size) for r in range(dp)]
        return [collate([data[i] for i in own]) for own in rows]

    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        total = 0.0
        for number in range(NUM_MICROBATCHES):
            met = batches((step * NUM_MICROBATCHES + number) * BATCH)
            boxes = sum(len(label["boxes"]) for batch in met for label in batch["labels"])
            mean = torch.tensor([boxes / dp / dp])
            with mock.patch.object(loss_for_object_detection, "reduce", lambda _, mean=mean: mean):
                for batch in met:
                    loss = model(**batch).loss / (dp * NUM_MICROBATCHES)
                    loss.backward()
                    total += loss.item()
        optimizer.step()
        losses.append(total)
    model.eval()
    with torch.no_grad():
        each = [model(**b).loss.item() for i in range(0, EVALUATED, BATCH) for b in batches(i)]
    boxes_of = [data[index]["labels"]["boxes"] for index in range(EVALUATED)]
    labels = [(len(boxes), float(boxes.sum())) for boxes in boxes_of]
    return losses, sum(each) / len(each), labels, model.state_dict()


LAYOUTS: list[tuple[Callable[[], nn.Module], dict[str, int]]] = [(yolos, {"dp": 2, "pp": 2})]
ALL_LAYOUTS = [
    (yolos, {"tp": 2, "pp": 2}),
    (detr, {"tp": 2, "pp": 2}),
    (yolos, {"dp": 2, "tp": 2}),
    (detr, {"pp": 4}),
]


@pytest.mark.parametrize(
    "layouts", [pytest.param(LAYOUTS, id="essential"), slow(ALL_LAYOUTS, id="all")]
)
def test_as_transformers_trains_them(pool: RankPool, layouts: Any, tmp_path: Path) -> None:
    every = pool.run(trained, 4, layouts, str(tmp_path))[0]
    for (build, degrees), found in zip(layouts, every, strict=True):
        dp = degrees.get("dp", 1)
        expected = replicas(build, dp) if dp > 1 else train(build, str(tmp_path / "their"))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
