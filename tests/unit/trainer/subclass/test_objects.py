"""Labels that are lists of Python objects reach the loss of a trainer as in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

import merak
from merak.core import mesh
from merak.core.errors import TraceError


@pytest.fixture(autouse=True)
def job() -> Iterator[None]:
    merak.init(device="cpu")
    yield
    mesh.reset()


class Points(Dataset[Any]):
    """Samples with some points each."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        points = torch.randn(index % 5, 3, generator=generator)
        return {"x": torch.randn(4, generator=generator), "labels": {"points": points}}


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"x": torch.stack([s["x"] for s in samples]), "labels": [s["labels"] for s in samples]}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:
        found = self.down(torch.tanh(self.up(x)))
        if labels is not None:
            found = found + len(labels)
        return {"found": found}


class Nearest:
    """The nearest point of each sample, which values choose."""

    def compute_loss(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, **of_step: Any
    ) -> Any:
        outputs = model(x=inputs["x"])
        seen = vars(self).setdefault("seen", [])
        terms = [outputs["found"].square().mean()]
        for found, label in zip(outputs["found"], inputs["labels"], strict=True):
            distances = (label["points"] - found).square().sum(-1)
            seen.append((len(label["points"]), label["points"].sum().item()))
            if len(distances) and distances.min().item() < 4:
                terms.append(distances.min())
        loss = torch.stack(terms).mean()
        return (loss, outputs) if return_outputs else loss


class Own(Nearest, merak.MerakTrainer):
    compute_loss = merak.eager_loss(Nearest.compute_loss)


class Their(Nearest, Trainer):
    pass


def trained(kind: Any, arguments: Any, folder: Path, **given: Any) -> Any:
    args = arguments(
        str(folder), max_steps=3, per_device_train_batch_size=4, logging_steps=1, report_to=[],
        use_cpu=True, remove_unused_columns=False, save_strategy="no", disable_tqdm=True,
        train_sampling_strategy="sequential", optim="sgd", learning_rate=0.1,
    )  # fmt: skip
    trainer = kind(Model(), args, train_dataset=Points(), data_collator=collate, **given)
    trainer.train()
    return trainer


def test_a_loss_that_runs_as_python_reads_them(tmp_path: Path) -> None:
    own = trained(Own, merak.MerakArguments, tmp_path / "own")
    their = trained(Their, TrainingArguments, tmp_path / "their")
    assert len(own.seen) == 12
    torch.testing.assert_close(own.seen, their.seen)
    torch.testing.assert_close(own.model.state_dict(), their.model.state_dict())


def test_a_forward_that_reads_them_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"len\(labels\)` reads the column 'labels', a list of"):
        trained(merak.MerakTrainer, merak.MerakArguments, tmp_path)
