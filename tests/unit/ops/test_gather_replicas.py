"""Rows of all replicas: a rank's own first, and the gradient of all replicas' losses."""

from __future__ import annotations

import torch

from merak.graph.ir.replicas import REPLICA_ROWS
from tests.ranks_in_turns import RanksInTurns

DEGREE, ROWS = 3, 2


def test_gradients_are_those_of_all_replicas_losses() -> None:
    torch.manual_seed(0)
    every = torch.randn(DEGREE * ROWS, 4, requires_grad=True)
    mixes = torch.randn(DEGREE, DEGREE * ROWS, 4)

    def loss(rows: torch.Tensor, rank: int) -> torch.Tensor:
        return (rows.sin() * mixes[rank].roll(-rank * ROWS, 0)).square().sum()

    def run(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        own = every.detach()[rank * ROWS :][:ROWS].clone().requires_grad_()
        gathered = REPLICA_ROWS(own, DEGREE)
        (gradient,) = torch.autograd.grad(loss(gathered, rank), own)
        return gathered.detach(), gradient

    found = RanksInTurns(DEGREE, "dp").run(run)
    total = sum(loss(every.roll(-rank * ROWS, 0), rank) for rank in range(DEGREE))
    assert isinstance(total, torch.Tensor)
    (expected,) = torch.autograd.grad(total, every)
    for rank, (gathered, gradient) in enumerate(found):
        assert torch.equal(gathered, every.detach().roll(-rank * ROWS, 0))
        torch.testing.assert_close(gradient, expected[rank * ROWS :][:ROWS])
