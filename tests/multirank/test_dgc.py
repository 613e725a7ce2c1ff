"""TopK and Deep Gradient Compression beside their algorithms in one process."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import merak
from tests.multirank.ranks import RankPool
from tests.multirank.test_one_bit import share
from tests.multirank.test_optimizers import assert_equal, make_model
from tests.tiers import slow

STEPS, FRACTION, RATE = 6, 0.05, 0.2
MOMENTUM = {"topk": 0.0, "dgc": 0.9}


def sgd(kind: str) -> Any:
    return partial(torch.optim.SGD, lr=RATE, momentum=MOMENTUM[kind])


def train(
    degrees: dict[str, int], kind: str, folder: str = "", first: int = 0
) -> dict[str, torch.Tensor]:
    """Train to the last step from `first`; saves after the third into a folder."""
    mesh = merak.init(**degrees, device="cpu")
    parallel = merak.parallelize(
        make_model(),
        share(0, mesh.dp, mesh.dp_rank),
        optimizer=sgd(kind),
        gradient_compression=kind,
        topk_fraction=FRACTION,
        bucket_bytes=3000,
    )
    if first:
        parallel.load_checkpoint(folder)
    for step in range(first, STEPS):
        parallel.step(share(step, mesh.dp, mesh.dp_rank))
        if folder and step == 2:
            parallel.save_checkpoint(folder)
    return parallel.gather_state_dict()


def published(kind: str, num_replicas: int) -> dict[str, torch.Tensor]:
    """Algorithm 4 of the paper for one process, without clipping and without its warm-up."""
    model = make_model()
    own = dict(model.named_parameters())
    left = [{n: torch.zeros(p.numel()).double() for n, p in own.items()} for _ in range(2)]
    velocity = [{n: torch.zeros(p.numel()).double() for n, p in own.items()} for _ in range(2)]
    for step in range(STEPS):
        sums = {name: torch.zeros_like(p) for name, p in own.items()}
        for number in range(num_replicas):
            model.zero_grad()
            model(**share(step, num_replicas, number)).backward()
            for name, p in own.items():
                fast, rest = velocity[number][name], left[number][name]
                fast.mul_(MOMENTUM[kind]).add_(p.grad.view(-1) / num_replicas)
                rest.add_(fast)
                count = -(-p.numel() * 5 // 100)
                sent = rest.abs().argsort(descending=True)[:count]
                sums[name].view(-1)[sent] += rest[sent]
                rest[sent] = 0.0
                fast[sent] = 0.0
        with torch.no_grad():
            for name, p in own.items():
                p.sub_(RATE * sums[name])
    return {name: p.detach() for name, p in own.items()}


@pytest.mark.parametrize(
    ("kind", "degrees"),
    [("dgc", {"dp": 2}), slow("topk", {"dp": 2}), slow("dgc", {"dp": 2, "pp": 2})],
)
def test_the_largest_elements_train_as_published(
    pool: RankPool, kind: str, degrees: dict[str, int]
) -> None:
    found = pool.run(train, degrees["dp"] * degrees.get("pp", 1), degrees, kind)
    assert_equal(found[0], published(kind, 2))
    assert all(torch.equal(found[0][name], one[name]) for one in found for name in one)


@pytest.mark.slow
def test_dgc_goes_on_to_the_bit(pool: RankPool, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    whole, again = (pool.run(train, 2, {"dp": 2}, "dgc", folder, first)[0] for first in (0, 3))
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def refused(make: Any) -> str:
    mesh = merak.init(dp=2, device="cpu")
    batch = share(0, 2, mesh.dp_rank)
    with pytest.raises(merak.MerakError) as caught:
        merak.parallelize(make_model(), batch, optimizer=make, gradient_compression="dgc")
    return str(caught.value)


def nesterov(own: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(own, lr=0.1, momentum=0.9, nesterov=True)


@pytest.mark.parametrize("make", [torch.optim.AdamW, slow(nesterov)])
def test_other_momenta_than_sgds_are_refused(pool: RankPool, make: Any) -> None:
    for sentence in pool.run(refused, 2, make):
        assert "corrects the momentum of torch.optim.SGD" in sentence
