"""What the ranks of a training job ask their datasets for, against transformers in one process."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from tests.multirank.ranks import RankPool
from tests.multirank.training import Layout, Texts, gpt2
from tests.tiers import slow

ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "max_steps": 3,
    "seed": 3,
    "use_cpu": True,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}


class Asked(Dataset[Any]):
    """A dataset that remembers which samples it was asked for."""

    def __init__(self, size: int) -> None:
        self.texts = Texts(size, padded=False)
        self.indices: list[int] = []

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Any:
        self.indices.append(index)
        return self.texts[index]


def run_twice(trainer: Trainer, asked: Asked) -> list[list[int]]:
    """Evaluate, then train twice; dropout draws on every rank.

    Returns:
        For both trainings, the samples that were asked for.
    """
    trainer.evaluate(Texts(6, padded=False))
    runs = []
    for _ in range(2):
        asked.indices.clear()
        trainer.train()
        runs.append(list(asked.indices))
    return runs


def train_in_one_process(num_microbatches: int) -> list[list[int]]:
    asked = Asked(17)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(folder, gradient_accumulation_steps=num_microbatches, **ARGUMENTS)
        return run_twice(Trainer(gpt2(0.1), args, train_dataset=asked), asked)


def train_here(layout: Layout, num_microbatches: int) -> list[list[int]]:
    import merak

    mesh = merak.init(*layout)
    asked = Asked(17)
    with tempfile.TemporaryDirectory() as folder:
        args = merak.MerakArguments(
            folder, gradient_accumulation_steps=num_microbatches // mesh.dp, **ARGUMENTS
        )
        return run_twice(merak.MerakTrainer(gpt2(0.1), args, train_dataset=asked), asked)


@pytest.mark.parametrize("layout", [slow((1, 1, 2)), (2, 1, 2), slow((1, 2, 1))], ids=str)
def test_every_run_takes_the_samples_of_one_process(pool: RankPool, layout: Layout) -> None:
    """Also after the engine has drawn random numbers, other ones on every rank."""
    dp, tp, pp = layout
    (expected,) = pool.run(train_in_one_process, 1, 4)
    ranks = pool.run(train_here, dp * tp * pp, layout, 4)
    for run in range(2):
        single = batches_of_two(expected[run])
        for rank, runs in enumerate(ranks):
            dp_rank = rank // tp % dp
            # The example batch, which every rank reads first, is the dataset's first samples.
            taken = [batch for batch in batches_of_two(runs[run]) if batch != [0, 1]]
            assert taken[:6] == single[dp_rank::dp][:6], (run, rank)


def batches_of_two(indices: list[int]) -> list[list[int]]:
    return [indices[first : first + 2] for first in range(0, len(indices), 2)]
