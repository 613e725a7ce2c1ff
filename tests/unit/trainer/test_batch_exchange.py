from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import merak
from merak.core import mesh
from merak.core.errors import DataError
from merak.engine.health.status import Progress
from merak.engine.health.step_records import HostClock
from merak.trainer.batch_exchange import BatchExchange, ExchangedBatches


@pytest.fixture
def exchange() -> Iterator[BatchExchange]:
    mesh.reset()
    yield BatchExchange(merak.init(device="cpu"), Progress(HostClock(), 0))
    mesh.reset()


def batch(size: int) -> dict[str, torch.Tensor]:
    return {"x": torch.zeros(size, 3), "y": torch.zeros(size, dtype=torch.long)}


def test_one_rank_agrees_with_itself(exchange: BatchExchange) -> None:
    agreement = exchange.exchange([batch(2), batch(1)], [{"labels": 5}, {"labels": 6}])
    assert agreement.num_microbatches == 2
    assert agreement.metadata == (({"labels": 5},), ({"labels": 6},))
    own = agreement.own(exchange.mesh)
    assert [number for number, _ in own] == [0, 1]
    assert [found["x"].shape for _, found in own] == [(2, 3), (1, 3)]


def test_a_round_without_a_microbatch_is_not_one_of_its_own(exchange: BatchExchange) -> None:
    agreement = exchange.exchange([batch(2), {}])
    assert agreement.num_microbatches == 1
    assert [number for number, _ in agreement.own(exchange.mesh)] == [0]


def test_no_rounds_are_no_microbatches(exchange: BatchExchange) -> None:
    assert exchange.exchange([]) == ExchangedBatches((), ())
    assert exchange.gather("said") == ["said"]


def test_columns_that_are_no_tensors_are_refused(exchange: BatchExchange) -> None:
    with pytest.raises(DataError, match="column 'x' of the batch is a list, not a tensor"):
        exchange.exchange([{"x": [1, 2]}])  # type: ignore[dict-item]
