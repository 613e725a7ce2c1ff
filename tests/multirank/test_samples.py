"""Ranks of one replica that read different samples end the job in its first step."""

from __future__ import annotations

import os
from typing import Any

import datasets  # type: ignore[import-untyped]
import pytest
import torch
from torch.utils.data import Dataset, Sampler
from transformers import default_data_collator

from merak.core.errors import DataError
from tests.multirank.ranks import RankPool
from tests.multirank.training import Layout, Setup, Texts, make_merak

SETUP = Setup("gpt2", num_samples=16, padded=False, arguments={"max_steps": 2})


def own_generator() -> torch.Generator:
    """Another one on every rank, as of a script that gives no seed."""
    return torch.Generator().manual_seed(int(os.environ["RANK"]))


class Shuffled(Dataset[dict[str, torch.Tensor]]):
    """Texts in an order that every rank has drawn for itself."""

    def __init__(self) -> None:
        self.texts = Texts(16, padded=False)
        self.order = torch.randperm(16, generator=own_generator()).tolist()

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.texts[self.order[index]]


class OwnOrder(Sampler[int]):
    """Indices in such an order."""

    def __iter__(self) -> Any:
        yield from torch.randperm(16, generator=own_generator()).tolist()

    def __len__(self) -> int:
        return 16


class Masking:
    """A collator that masks tokens by a generator of its own, which no seed reaches."""

    def __init__(self) -> None:
        self.draws = own_generator()

    def __call__(self, samples: Any) -> dict[str, torch.Tensor]:
        batch = default_data_collator(samples)
        drawn = torch.rand(batch["input_ids"].shape, generator=self.draws)
        batch["input_ids"] = batch["input_ids"].masked_fill(drawn < 0.3, 0)
        return batch


def kinds() -> dict[str, dict[str, Any]]:
    stored = [{n: v.tolist() for n, v in sample.items()} for sample in Shuffled()]
    with_sampler = _sampled()
    return {
        "dataset": {"train_dataset": Shuffled()},
        "stored": {"train_dataset": datasets.Dataset.from_list(stored)},
        "sampler": {"trainer_class": with_sampler},
        "collator": {"data_collator": Masking()},
    }


def _sampled() -> type:
    import merak

    class Sampled(merak.MerakTrainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            return OwnOrder()

    return Sampled


def train(layout: Layout, names: list[str], cache: str) -> list[str]:
    """What is said of each job on this rank; "" where it trains."""
    import merak

    dp, tp, pp = layout
    merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    said = []
    for name in names:
        trainer = make_merak(SETUP, dp, cache, **kinds()[name])
        try:
            trainer.train()
            said.append("")
        except DataError as error:
            assert trainer.state.global_step == 0
            said.append(str(error))
    return said


@pytest.mark.parametrize("layout", [(1, 1, 2)])
def test_different_samples_are_refused(pool: RankPool, cache: str, layout: Layout) -> None:
    for said in pool.run(train, 2, layout, ["dataset", "stored", "sampler"], cache):
        for sentence in said:
            assert sentence.startswith("rank 0 and rank 1 compute one ")
            assert "give a seed to its shuffle or split" in sentence
        assert "'input_ids', 'labels' differ" in said[0]
        assert "'input_ids', 'labels' differ" in said[1]
        assert "the sampler's indices differ" in said[2]


@pytest.mark.slow
def test_a_column_that_others_do_not_read_may_differ(pool: RankPool, cache: str) -> None:
    """The first stage alone reads tokens, and the last one labels, which are the same."""
    assert pool.run(train, 2, (1, 1, 2), ["collator"], cache) == [[""], [""]]


@pytest.mark.slow
def test_a_column_that_both_read_may_not(pool: RankPool, cache: str) -> None:
    for said in pool.run(train, 2, (1, 2, 1), ["collator"], cache):
        assert "'input_ids' differ" in said[0]


@pytest.mark.slow
def test_replicas_may_read_different_samples(pool: RankPool, cache: str) -> None:
    assert pool.run(train, 2, (2, 1, 1), ["dataset"], cache) == [[""], [""]]
