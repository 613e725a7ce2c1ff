from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from merak.core.errors import DataError
from merak.trainer.last_step import refuse_unequal_replicas


def arguments(**changes: Any) -> Any:
    usual = {
        "max_steps": -1, "num_train_epochs": 3, "gradient_accumulation_steps": 2,
        "dataloader_drop_last": False, "should_log": True, "zero": 3, "schedule": "pipedream",
    }  # fmt: skip
    return SimpleNamespace(**usual | changes)


def loader(num_batches: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.zeros(num_batches)))


def refuse(num_batches: int, dp: int = 2, **changes: Any) -> None:
    refuse_unequal_replicas(arguments(**changes), loader(num_batches), dp)


def test_a_ragged_step_is_known_before_the_first_one() -> None:
    with pytest.raises(DataError) as caught:
        refuse(17, dp=4)
    assert str(caught.value) == (
        "zero=3 gathers parameters on all replicas together, but the 17 batches of an epoch are no "
        "multiple of dp=4, so that step 3 would have more on 1 of the replicas than on the others; "
        "leave them out (dataloader_drop_last=True), give a dataset of another length, or end "
        "before it (max_steps=2)."
    )


@pytest.mark.parametrize(
    "num_batches,changes",
    [
        (16, {}),
        (17, {"dataloader_drop_last": True}),
        (17, {"max_steps": 4}),
        (17, {"num_train_epochs": 0.75}),
        (17, {"dp": 1}),
        (17, {"zero": 2}),
    ],
)
def test_steps_that_are_equal_or_never_come(num_batches: int, changes: dict[str, Any]) -> None:
    refuse(num_batches, **changes)


@pytest.mark.parametrize("changes", [{"max_steps": 5}, {"num_train_epochs": 0.9}])
def test_a_ragged_step_that_comes(changes: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="step 5 would have more on 1 of the replicas"):
        refuse(17, **changes)


def test_an_epoch_of_one_step() -> None:
    with pytest.raises(DataError, match=r"give a dataset of another length\.$"):
        refuse(1)


def test_an_asynchronous_schedule_needs_equal_replicas_too() -> None:
    with pytest.raises(DataError, match="schedule='pipedream' updates weights on all replicas"):
        refuse_unequal_replicas(arguments(zero=0), loader(17), 2, updates_inside=True)


class Endless(IterableDataset[Any]):
    """Of no known length."""

    def __iter__(self) -> Any:
        return iter([])


def test_a_stream_of_unknown_length_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        refuse_unequal_replicas(arguments(), DataLoader(Endless()), 2)
    assert "the job ends there; leave them out (dataloader_drop_last=True)" in caplog.text
