"""The inputs of a step's microbatches, as the trainer's loop gives them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from merak.core.errors import DataError, TrainingError
from merak.trainer.batch_exchange import ExchangedBatches
from merak.trainer.step_inputs import StepInputs

IDS = torch.arange(6).view(2, 3)


def of(*batches: dict[str, Any]) -> StepInputs:
    metadata = tuple(({"inputs": number},) for number in range(len(batches)))
    return StepInputs(batches, ExchangedBatches((), metadata))


def test_the_last_microbatch_completes_the_step() -> None:
    step = of({"input_ids": IDS}, {"input_ids": IDS})
    assert not step.add(object, {"input_ids": IDS})
    assert step.metadata == ({"inputs": 0},)
    changed = {"input_ids": IDS + 1}
    assert step.add(object, changed)
    assert step.metadata == ({"inputs": 1},)
    assert step.microbatches[1] is changed


@pytest.mark.parametrize(
    "changed,name",
    [
        ({"input_ids": IDS, "weights": IDS}, "'weights' of a batch from none to "),
        ({}, "'input_ids' of a batch from (2, 3) torch.int64 to "),
        ({"input_ids": IDS[:, :2]}, "'input_ids' of a batch from (2, 3) torch.int64 to "),
        ({"input_ids": IDS.float()}, "'input_ids' of a batch from (2, 3) torch.int64 to "),
    ],
)
def test_other_columns_shapes_and_types_are_refused(changed: dict[str, Any], name: str) -> None:
    class Changing:
        pass

    with pytest.raises(DataError) as caught:
        of({"input_ids": IDS}).add(Changing, changed)
    assert str(caught.value).startswith("Changing changes column " + name)


def test_a_microbatch_that_is_trained_twice_is_refused() -> None:
    step = of({"input_ids": IDS}, {"input_ids": IDS})
    for batch in step:
        step.add(object, batch)
        with pytest.raises(TrainingError, match="more than once for a microbatch"):
            step.add(object, batch)
    assert step.is_complete


def test_a_list_made_of_the_microbatches_runs_them_all() -> None:
    step = of({"input_ids": IDS}, {"input_ids": IDS})
    for batch in step[::-1]:
        step.add(object, batch)
    assert step.is_complete
