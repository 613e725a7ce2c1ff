"""Autograd functions that see a size, on real ranks: gradients are those of plain PyTorch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import merak
from merak.core.mesh import current_mesh
from merak.core.shards import take
from tests.multirank.ranks import RankPool
from tests.tiers import slow
from tests.unit.graph import own_backwards as own
from tests.unit.graph.tensor_parallel_cases import assert_gradients_equal

MICROBATCHES, SAMPLES = 2, 4
FUNCTIONS = (own.SizeInBackward, own.LastSize, own.FirstSize, own.TwoResults, own.Clipped)
MODELS = {
    **{function.__name__: partial(own.Layers, function) for function in FUNCTIONS},
    "EarlyReaders": own.EarlyReaders,
    "QuantisedWeights": own.QuantisedWeights,
}
Seen = tuple[float, dict[str, torch.Tensor]]


def trained(options: dict[str, Any]) -> dict[str, tuple[Seen, Seen]]:
    """Of every model, loss and parameters after a step: a rank's, and plain PyTorch's."""
    merak.init(tp=2, device="cpu")
    generator = torch.Generator().manual_seed(1)
    batch = {"x": torch.randn(MICROBATCHES * SAMPLES, 8, generator=generator)}
    found = {}
    for name, make in MODELS.items():
        torch.manual_seed(5)
        model = make()
        plain: nn.Module = make()
        plain.load_state_dict(model.state_dict())
        parallel = merak.parallelize(
            model, batch, num_microbatches=MICROBATCHES,
            optimizer=partial(torch.optim.SGD, lr=1.0), **options,
        )  # fmt: skip
        loss = float(parallel.step(batch))
        shards, rank = parallel.engine.shards, current_mesh().tp_rank
        values = {n: p.detach().clone() for n, p in parallel.engine.parameters.items()}
        expected, whole = step(plain, batch["x"])
        parts = {n: take(t, shards[n], rank) if n in shards else t for n, t in whole.items()}
        found[name] = (loss, values), (expected, parts)
    return found


def step(plain: nn.Module, x: torch.Tensor) -> Seen:
    optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)
    total = 0.0
    for part in x.chunk(MICROBATCHES):
        one = plain(part) / MICROBATCHES
        one.backward()
        total += float(one.detach())
    optimizer.step()
    return total, {n: p.detach().clone() for n, p in plain.named_parameters()}


@pytest.mark.parametrize(
    "options",
    [{"sub_pipelining": "off"}, slow({"sub_pipelining": "on"}), slow({"sequence_parallel": True})],
    ids=["whole", "in sub-microbatches", "in shards of the sequence"],
)
def test_gradients_are_those_of_the_whole(pool: RankPool, options: dict[str, Any]) -> None:
    for found in pool.run(trained, 2, options):
        assert found.keys() == MODELS.keys()
        for (loss, parameters), (expected, others) in found.values():
            assert loss == pytest.approx(expected, rel=1e-5)
            assert_gradients_equal(parameters, others)
