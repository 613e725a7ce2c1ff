"""Sparse gradients of one rank stay sparse where nothing sums them."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

import merak
from merak.core.gradients import dense
from merak.plan.cost.device import preset


class Looked(nn.Module):
    """A table, which a second look-up far behind may read as well."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.again = again
        self.table = nn.Embedding(9, 4, sparse=True)
        self.blocks = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.blocks(self.table(ids))
        return (x + self.table(ids) if self.again else x).square().mean()


class Alone(nn.Module):
    """A table and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4, sparse=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids).square().mean()


pytestmark = pytest.mark.usefixtures("one_rank")


BATCH = {"ids": torch.tensor([1, 3, 3, 5])}


def test_sparse_adam_steps_a_sparse_gradient_as_in_torch() -> None:
    model, expected = Alone(), Alone()
    expected.load_state_dict(model.state_dict())
    make = torch.optim.SparseAdam
    parallel = merak.parallelize(model, BATCH, optimizer=lambda found: make(list(found), lr=0.1))
    other = make(list(expected.parameters()), lr=0.1)
    for _ in range(2):
        parallel.step(BATCH)
        other.zero_grad()
        expected(**BATCH).backward()
        other.step()
    assert torch.equal(parallel.engine.parameters["table.weight"], expected.table.weight)


def test_what_several_segments_look_up_is_dense(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        parallel = merak.parallelize(Looked(again=True), BATCH, max_grad_norm=1.0)
    assert [r for r in caplog.records if "sparse gradients of table.weight are dense" in r.message]
    parallel.step(BATCH)
    assert not parallel.engine.parameters["table.weight"].grad.is_sparse


def test_what_one_segment_looks_up_stays_sparse(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        parallel = merak.parallelize(Looked(), BATCH, max_grad_norm=1.0)
    assert not caplog.records
    parallel.step(BATCH)
    assert parallel.engine.parameters["table.weight"].grad.is_sparse


def test_a_sparse_gradient_is_made_dense() -> None:
    found = torch.sparse_coo_tensor([[1, 1]], torch.ones(2, 3), (2, 3), check_invariants=True)
    assert torch.equal(dense(found), torch.tensor([[0.0] * 3, [2.0] * 3]))
    assert dense(dense(found)).layout == torch.strided


@pytest.mark.parametrize("is_measured", [True, False])
def test_a_job_is_summed_up_whose_memory_is_hard_to_tell(
    monkeypatch: pytest.MonkeyPatch, is_measured: bool
) -> None:
    def unknown(*_: object) -> None:
        raise RuntimeError("a value is read")

    monkeypatch.setattr("merak.engine.build.is_announcing", lambda: True)
    monkeypatch.setattr("merak.engine.build.known_profile", lambda *_: preset("a100-80gb"))
    if not is_measured:
        monkeypatch.setattr("merak.plan.activations.forecast.MemoryModel", unknown)
    assert merak.parallelize(Alone(), BATCH).step(BATCH).isfinite()
