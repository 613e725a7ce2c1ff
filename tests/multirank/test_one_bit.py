"""Optimizers with a frozen variance, whose momenta replicas send as signs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import merak
from tests.multirank.ranks import RankPool
from tests.multirank.test_optimizers import assert_equal, batch_of, make_model
from tests.tiers import slow

WARMUP, STEPS = 2, 6


def one_bit_adam(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return merak.OneBitAdam(parameters, lr=1e-2, warmup_steps=WARMUP, weight_decay=0.1)


def share(step: int, dp: int, number: int) -> dict[str, torch.Tensor]:
    return {name: own.chunk(dp)[number] for name, own in batch_of(step).items()}


def train(
    degrees: dict[str, int], options: dict[str, Any], steps: int = STEPS
) -> dict[str, torch.Tensor]:
    mesh = merak.init(**degrees, device="cpu")
    parallel = merak.parallelize(
        make_model(), share(0, mesh.dp, mesh.dp_rank), optimizer=one_bit_adam, **options
    )
    for step in range(steps):
        parallel.step(share(step, mesh.dp, mesh.dp_rank))
    return parallel.gather_state_dict()


def signs(tensor: torch.Tensor) -> torch.Tensor:
    """What is sent of a tensor: the mean magnitude of each row, with signs."""
    rows = tensor if tensor.dim() > 1 else tensor[None]
    means = rows.abs().float().mean(dim=1, keepdim=True).to(tensor.dtype)
    return torch.where(rows >= 0, means, -means).view_as(tensor)


def published(num_replicas: int) -> dict[str, torch.Tensor]:
    """1-bit Adam of the paper's algorithm 1 in one process, with AdamW's corrections of bias."""
    model = make_model()
    own = dict(model.named_parameters())

    def zeros() -> dict[str, torch.Tensor]:
        return {name: torch.zeros_like(p) for name, p in own.items()}

    momentum, square, served = zeros(), zeros(), zeros()
    errors = [zeros() for _ in range(num_replicas)]
    for step in range(STEPS):
        gradients = []
        for number in range(num_replicas):
            model.zero_grad()
            model(**share(step, num_replicas, number)).backward()
            gradients.append({name: p.grad for name, p in own.items()})
        for name, p in own.items():
            if step < WARMUP:
                mean = sum(each[name] for each in gradients) / num_replicas
                momentum[name] = 0.9 * momentum[name] + 0.1 * mean
                square[name] = 0.999 * square[name] + 0.001 * mean**2
            else:
                total = served[name]
                for each, error in zip(gradients, errors, strict=True):
                    local = 0.9 * momentum[name] + 0.1 * each[name] + error[name]
                    error[name] = local - signs(local)
                    total = total + signs(local) / num_replicas
                momentum[name] = signs(total)
                served[name] = total - signs(total)
            root = (square[name] / (1 - 0.999 ** min(step + 1, WARMUP))).sqrt() + 1e-8
            with torch.no_grad():
                p.mul_(1 - 1e-2 * 0.1)
                p.sub_(1e-2 / (1 - 0.9 ** (step + 1)) * momentum[name] / root)
    return {name: p.detach() for name, p in own.items()}


@pytest.mark.parametrize("degrees", [{"dp": 2}, slow({"dp": 3}), slow({"dp": 2, "pp": 2})])
def test_1_bit_adam_is_the_published_one(pool: RankPool, degrees: dict[str, int]) -> None:
    ranks = degrees["dp"] * degrees.get("pp", 1)
    found = pool.run(train, ranks, degrees, {"gradient_compression": "1bit", "bucket_bytes": 3000})
    assert all(torch.equal(found[0][name], one[name]) for one in found for name in one)
    expected = published(degrees["dp"])
    for name, value in expected.items():
        # Scales are sent in float32.
        torch.testing.assert_close(found[0][name], value, rtol=1e-5, atol=1e-6, msg=name)


def test_its_warm_up_is_adamw_and_its_variance_stays() -> None:
    ours, theirs = make_model(), make_model()
    first = one_bit_adam(ours.parameters())
    second = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(STEPS):
        if step == WARMUP:
            assert_equal(ours.state_dict(), theirs.state_dict())
        for model, optimizer in ((ours, first), (theirs, second)):
            optimizer.zero_grad()
            model(**batch_of(step)).backward()
            optimizer.step()
        if step == WARMUP - 1:
            frozen = [state["exp_avg_sq"].clone() for state in first.state.values()]
    after = [state["exp_avg_sq"] for state in first.state.values()]
    assert all(torch.equal(a, b) for a, b in zip(frozen, after, strict=True))
    assert not torch.equal(ours.blocks[0].up.weight, theirs.blocks[0].up.weight)


def resumed(folder: str, first: int) -> dict[str, torch.Tensor]:
    """Train to the last step from `first`, saving after the fourth: signs have been sent twice."""
    mesh = merak.init(dp=2, device="cpu")
    parallel = merak.parallelize(
        make_model(),
        share(0, 2, mesh.dp_rank),
        optimizer=one_bit_adam,
        gradient_compression="1bit",
        bucket_bytes=3000,
    )
    if first:
        parallel.load_checkpoint(folder)
    for step in range(first, STEPS):
        parallel.step(share(step, 2, mesh.dp_rank))
        if step == 3:
            parallel.save_checkpoint(folder)
    return parallel.gather_state_dict()


def test_it_goes_on_to_the_bit(pool: RankPool, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    whole, again = (pool.run(resumed, 2, folder, first)[0] for first in (0, 4))
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_a_warm_up_of_nothing_is_refused() -> None:
    with pytest.raises(merak.MerakError, match="leaves no second moment to freeze"):
        merak.OneBitAdam(make_model().parameters(), warmup_steps=0)
