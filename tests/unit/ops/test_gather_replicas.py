"""Rows and sums of all replicas, and the gradient of all replicas' losses."""

from __future__ import annotations

import pytest
import torch

from merak.graph.ir.replicas import REPLICA_ROWS, REPLICA_SUM
from tests.ranks_in_turns import RanksInTurns

DEGREE, ROWS = 3, 2


@pytest.mark.parametrize("is_sum", [False, True])
def test_gradients_are_those_of_all_replicas_losses(is_sum: bool) -> None:
    torch.manual_seed(0)
    every = torch.randn(DEGREE * ROWS, 4, requires_grad=True)
    mixes = torch.randn(DEGREE, ROWS if is_sum else DEGREE * ROWS, 4)

    def met(rows: torch.Tensor) -> torch.Tensor:
        return rows.view(DEGREE, ROWS, 4).sum(0) if is_sum else rows

    def loss(rows: torch.Tensor, rank: int) -> torch.Tensor:
        return (rows.sin() * mixes[rank]).square().sum()

    def run(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        own = every.detach()[rank * ROWS :][:ROWS].clone().requires_grad_()
        found = REPLICA_SUM(own) if is_sum else REPLICA_ROWS(own, DEGREE)
        (gradient,) = torch.autograd.grad(loss(found, rank), own)
        return found.detach(), gradient

    found = RanksInTurns(DEGREE, "dp").run(run)
    total = sum(loss(met(every), rank) for rank in range(DEGREE))
    assert isinstance(total, torch.Tensor)
    (expected,) = torch.autograd.grad(total, every)
    for rank, (rows, gradient) in enumerate(found):
        torch.testing.assert_close(rows, met(every.detach()))
        torch.testing.assert_close(gradient, expected[rank * ROWS :][:ROWS])
