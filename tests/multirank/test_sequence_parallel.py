"""Sequence parallelism on real ranks gives what one process gives."""

from __future__ import annotations

import pytest
import torch

from merak.core import collectives
from merak.core.mesh import init
from merak.core.regather import keeping_shares
from tests.multirank.compare import assert_close
from tests.multirank.ranks import RankPool
from tests.multirank.training import Setup, train_merak

SHARED = {"sequence_parallel": True, "max_steps": 3}
SETUPS = [
    Setup("gpt2", dropout=0.1, num_samples=32, arguments={**SHARED, "max_grad_norm": 0.5}),
    Setup("llama", num_samples=32, arguments=SHARED),
    Setup("bert", dropout=0.1, num_samples=32, arguments={**SHARED, "recompute": "full"}),
    Setup("plain", dropout=0.1, num_samples=32, arguments=SHARED),
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Traces are shared by all jobs of the module."""
    return str(tmp_path_factory.mktemp("traces"))


@pytest.mark.parametrize("layout", [(1, 2, 1), (1, 2, 2)])
def test_ranks_equal_one_process(pool: RankPool, cache: str, layout: tuple[int, int, int]) -> None:
    # Merak on one rank, which draws dropout as every layout does.
    (expected,) = pool.run(train_merak, 1, (1, 1, 1), SETUPS, cache)
    dp, tp, pp = layout
    ranks = pool.run(train_merak, dp * tp * pp, layout, SETUPS, cache)
    for i, wanted in enumerate(expected):
        assert_close([rank[i] for rank in ranks], wanted)


def products_of_shares(keep: bool) -> list[torch.Tensor]:
    """Gradients of three products of what is gathered from shares, one of them of a view of it."""
    mesh = init(tp=2, device="cpu")
    torch.manual_seed(mesh.tp_rank)
    x, others = torch.randn(2, 3, 4), [torch.randn(4, 5) for _ in range(3)]
    leaves = [tensor.requires_grad_() for tensor in (x, *others)]

    def loss(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        whole = collectives.gather_copied(x, 1, (6,), "tp")
        views = (whole, whole, whole.view(12, 4))
        return sum(((v @ w).tanh().sum() for v, w in zip(views, weights)), torch.zeros(()))

    (keeping_shares(loss) if keep else loss)(*leaves).backward()
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def test_what_is_gathered_again_is_what_was_gathered(pool: RankPool) -> None:
    for kept, whole in zip(
        pool.run(products_of_shares, 2, True), pool.run(products_of_shares, 2, False), strict=True
    ):
        assert len(kept) == 4
        assert all(torch.equal(a, b) for a, b in zip(kept, whole, strict=True))
