"""Dropout and other draws over values that are not contiguous: equal in every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.multirank.compare import whole
from tests.multirank.ranks import RankPool
from tests.multirank.training import Outcome
from tests.tiers import slow
from tests.unit.graph.tensor_parallel_cases import assert_gradients_equal

WIDTH, TOKENS, BATCH = 8, 6, 8


class Convolved(nn.Module):
    """A feed-forward of convolutions, transposed back before its dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Conv1d(WIDTH, 4 * WIDTH, 1)
        self.down = nn.Conv1d(4 * WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.dropout(self.down(functional.relu(self.up(x.mT))).mT, 0.5)


class TokensFirst(nn.Module):
    """A block of a stack in (tokens, batch, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.empty_like(x).bernoulli_(0.7) + torch.rand_like(x)
        x = functional.dropout(self.norm(x), 0.5) * mask
        return x + functional.dropout(self.down(torch.tanh(self.up(x))), 0.5)


class Opaque(nn.Module):
    """A module that no trace sees through, for its hook, and which draws as well."""

    def forward(self, x: Tensor) -> Tensor:
        dropped = functional.dropout(x, 0.5)
        if dropped.requires_grad:
            dropped.register_hook(lambda gradient: gradient / 2)
        return dropped


class Images(nn.Module):
    """A convolution in channels-last format, and an expanded value."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        image = x.permute(1, 2, 0).unsqueeze(-1).contiguous(memory_format=torch.channels_last)
        image = functional.dropout(self.conv(image), 0.5)
        wide = functional.dropout(image.mean(2, keepdim=True).expand(image.shape), 0.5)
        return (image + wide).squeeze(-1).permute(2, 0, 1)


class Strided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.convolved = Convolved()
        self.first = nn.ModuleList(TokensFirst() for _ in range(2))
        self.opaque = Opaque()
        self.images = Images()
        self.last = nn.ModuleList(TokensFirst() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.convolved(x).transpose(0, 1)
        for block in self.first:
            x = block(x)
        x = self.images(self.opaque(x))
        for block in self.last:
            x = block(x)
        return x.square().mean()


def train(degrees: dict[str, int], options: dict[str, Any]) -> Outcome:
    import merak

    mesh = merak.init(**degrees, device="cpu")  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(BATCH, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    share = {"x": torch.cat(x.chunk(4)[mesh.dp_rank :: mesh.dp])}  # microbatches take turns
    model = Strided().double()
    num_microbatches = 4 // mesh.dp
    parallel = merak.parallelize(model, share, num_microbatches=num_microbatches, **options)
    outcome = Outcome(place=(mesh.dp_rank, mesh.tp_rank, mesh.pp_rank))
    outcome.losses.append(parallel.step(share).item())
    found = parallel.engine.parameters.items()
    outcome.first = {n: p.grad.clone() for n, p in found if p.grad is not None}
    outcome.shards = dict(parallel.engine.shards)
    return outcome


@pytest.mark.parametrize(
    "degrees,options",
    [
        ({"pp": 2}, {}),
        slow({"tp": 2}, {}),
        slow({"pp": 2}, {"recompute": "full"}),
        slow({"tp": 2}, {"sub_pipelining": "on"}),
    ],
)
def test_draws_over_strided_values_do_not_depend_on_the_layout(
    pool: RankPool, degrees: dict[str, int], options: dict[str, Any]
) -> None:
    (expected,) = pool.run(train, 1, {}, {})
    ranks = pool.run(train, 2 if len(degrees) == 1 else 4, degrees, options)
    if "tp" in degrees:
        assert ranks[0].shards, "nothing is split"
    for rank in ranks:
        assert rank.losses == pytest.approx(expected.losses, rel=1e-6)  # float32 over replicas
    assert_gradients_equal(whole(ranks, "first"), expected.first)
