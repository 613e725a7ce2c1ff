"""Small datasets, collators and loaders for the tests of merak.data."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainingArguments

from merak.data import shard_loader


class Recorder:
    """A map-style dataset that remembers which samples were asked for."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= self.length:
            raise IndexError(index)  # ends a loop over a dataset that has no __iter__
        self.asked.append(index)
        return {
            "input_ids": torch.full((3,), index),
            "labels": torch.full((3,), -index),
        }


class Stream(IterableDataset):
    """An iterable dataset of the numbers below `length`, split over workers, shifted by epoch."""

    def __init__(self, length: int, sized: bool = False) -> None:
        self.length = length
        self.epoch = 0
        self.num_read = 0
        if sized:
            self.__class__ = SizedStream

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = torch.utils.data.get_worker_info()
        start, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for index in range(start, self.length, step):
            self.num_read += 1
            number = index + 1000 * self.epoch
            yield {"input_ids": torch.tensor([number]), "labels": torch.tensor([-number])}


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.length


class TakesAll(nn.Module):
    """A model whose forward takes the columns of the datasets here."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, input_ids: Any, labels: Any = None, attention_mask: Any = None) -> None:
        raise NotImplementedError


def noisy_collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Derives labels, and draws from each of the global generators."""
    ids = torch.stack([sample["input_ids"] for sample in samples])
    noise = torch.rand(ids.shape)
    noise = noise + torch.from_numpy(np.random.rand(*ids.shape)) + random.random()
    return {"input_ids": ids, "noise": noise, "labels": ids + (noise > 1.5).long()}


def prepared_loader(tmp_path: Any, dataset: Any, collate: Any = None, **arguments: Any) -> Any:
    """The training loader that `transformers.Trainer` makes in a single process."""
    arguments = {"seed": 5, "per_device_train_batch_size": 2} | arguments
    args = TrainingArguments(
        str(tmp_path), use_cpu=True, report_to=[], dataloader_pin_memory=False, **arguments
    )
    trainer = Trainer(TakesAll(), args, train_dataset=dataset, data_collator=collate)
    return trainer.get_train_dataloader()


def plain_loader(dataset: Any, batch_size: int | None = 2, **options: Any) -> Any:
    return DataLoader(dataset, batch_size=batch_size, **options)


def share(
    loader: Any, dp_degree: int = 1, dp_rank: int = 0, columns: Any = None, **more: Any
) -> Any:
    return shard_loader(
        loader, dp_degree=dp_degree, dp_rank=dp_rank, columns=columns, seed=5, **more
    )


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[c], right[c]) for c in left)


def interleave(shares: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The batches of all data parallel ranks in the order of a single process."""
    rounds = zip(*shares, strict=True)
    return [batch for turn in rounds for batch in turn if batch]
