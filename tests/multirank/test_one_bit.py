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


def one_bit_lamb(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return merak.OneBitLamb(parameters, lr=1e-2, warmup_steps=WARMUP, weight_decay=0.1)


def train(
    degrees: dict[str, int], options: dict[str, Any], make: Any = one_bit_adam
) -> dict[str, torch.Tensor]:
    mesh = merak.init(**degrees, device="cpu")
    parallel = merak.parallelize(
        make_model(), share(0, mesh.dp, mesh.dp_rank), optimizer=make, **options
    )
    for step in range(STEPS):
        parallel.step(share(step, mesh.dp, mesh.dp_rank))
    return parallel.gather_state_dict()


def signs(tensor: torch.Tensor) -> torch.Tensor:
    """What is sent of a tensor: the mean magnitude of each row, with signs."""
    rows = tensor if tensor.dim() > 1 else tensor[None]
    means = rows.abs().float().mean(dim=1, keepdim=True).to(tensor.dtype)
    return torch.where(rows >= 0, means, -means).view_as(tensor)


class Lamb:
    """What 1-bit LAMB's algorithm 1 keeps of a parameter."""

    def __init__(self) -> None:
        self.coefficient, self.factor = 0.0, 1.0
        self.fresh = torch.zeros(())

    def ratio(self, p: torch.Tensor, update: torch.Tensor, whole: torch.Tensor, step: int) -> float:
        own = float(p.norm() / whole.norm()) if p.norm() > 0 else 1.0
        own = min(max(own, 0.01), 10.0)
        self.coefficient = own if step == 0 else 0.9 * self.coefficient + 0.1 * own
        return own

    def frozen(self, gradient: torch.Tensor, square: torch.Tensor, part: float, step: int) -> float:
        self.fresh = 0.999 * self.fresh + 0.001 * gradient**2
        roots = [
            (own / (1 - 0.999**number)).sqrt() + 1e-8
            for own, number in ((square, WARMUP), (self.fresh, step + 1))
        ]
        factor = min(1.0, part) * float((roots[0] / roots[1]).max()) + 1 - min(1.0, part)
        factor = min(max(factor, 0.5), 4.0)
        self.factor = min(max(factor, 0.9 * self.factor), 1.1 * self.factor)
        return self.coefficient * self.factor


def published(num_replicas: int, is_lamb: bool = False) -> dict[str, torch.Tensor]:
    """1-bit Adam and LAMB of the papers' algorithms in one process, with moments without bias."""
    model = make_model()
    own = dict(model.named_parameters())

    def zeros() -> dict[str, torch.Tensor]:
        return {name: torch.zeros_like(p) for name, p in own.items()}

    momentum, square, served = zeros(), zeros(), zeros()
    errors = [zeros() for _ in range(num_replicas)]
    lambs = {name: Lamb() for name in own}
    for step in range(STEPS):
        gradients = []
        for number in range(num_replicas):
            model.zero_grad()
            model(**share(step, num_replicas, number)).backward()
            gradients.append({name: p.grad for name, p in own.items()})
        for name, p in own.items():
            before = momentum[name]
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
            update = momentum[name] / (1 - 0.9 ** (step + 1)) / root
            with torch.no_grad():
                whole, rate = update + 0.1 * p, 1e-2
                if is_lamb and step < WARMUP:
                    rate *= lambs[name].ratio(p, update, whole, step)
                    lambs[name].fresh = square[name]
                elif is_lamb:
                    gradient = (momentum[name] - 0.9 * before) / 0.1
                    part = float(update.norm() / whole.norm())
                    rate *= lambs[name].frozen(gradient, square[name], part, step)
                p.sub_(rate * whole)
    return {name: p.detach() for name, p in own.items()}


@pytest.mark.parametrize(
    ("make", "degrees"),
    [
        (one_bit_adam, {"dp": 2}),
        slow(one_bit_adam, {"dp": 3}),
        slow(one_bit_adam, {"dp": 2, "pp": 2}),
        slow(one_bit_lamb, {"dp": 2, "pp": 2}),
    ],
)
def test_they_are_the_published_ones(pool: RankPool, make: Any, degrees: dict[str, int]) -> None:
    ranks = degrees["dp"] * degrees.get("pp", 1)
    options = {"gradient_compression": "1bit", "bucket_bytes": 3000}
    found = pool.run(train, ranks, degrees, options, make)
    assert all(torch.equal(found[0][name], one[name]) for one in found for name in one)
    expected = published(degrees["dp"], make is one_bit_lamb)
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


def resumed(folder: str, first: int, make: Any) -> dict[str, torch.Tensor]:
    """Train to the last step from `first`, saving after the fourth: signs have been sent twice."""
    mesh = merak.init(dp=2, device="cpu")
    parallel = merak.parallelize(
        make_model(),
        share(0, 2, mesh.dp_rank),
        optimizer=make,
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


@pytest.mark.parametrize("make", [one_bit_adam, slow(one_bit_lamb)])
def test_they_go_on_to_the_bit(pool: RankPool, make: Any, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    whole, again = (pool.run(resumed, 2, folder, first, make)[0] for first in (0, 4))
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_a_warm_up_of_nothing_is_refused() -> None:
    with pytest.raises(merak.MerakError, match="leaves no second moment to freeze"):
        merak.OneBitAdam(make_model().parameters(), warmup_steps=0)


def refusal(degrees: dict[str, int], make: Any, options: dict[str, Any]) -> str:
    mesh = merak.init(**degrees, device="cpu")
    batch = share(0, 2, mesh.dp_rank)
    with pytest.raises(merak.MerakError) as caught:
        merak.parallelize(
            make_model(), batch, optimizer=make, gradient_compression="1bit", **options
        )
    return str(caught.value)


class OneBitMuon(merak.OneBitAdam):
    """Has a momentum, and steps by products of whole matrices."""

    def _move(self, parameter: Any, update: Any, root: Any, gradient: Any, group: Any) -> None:
        whole = update @ update.T @ update if update.dim() == 2 else update
        parameter.sub_(group["lr"] * whole)


def one_bit_muon(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return OneBitMuon(parameters, warmup_steps=WARMUP)


@pytest.mark.slow
def test_momenta_that_replicas_do_not_have_are_refused(pool: RankPool) -> None:
    for sentence in pool.run(refusal, 4, {"dp": 2, "tp": 2}, one_bit_muon, {}):
        assert "use tp=1, merak.OneBitAdam, or gradient_compression='off'" in sentence
    for sentence in pool.run(refusal, 2, {"dp": 2}, one_bit_adam, {"offload_optimizer": "cpu"}):
        assert "use offload_optimizer=None, or gradient_compression='off'" in sentence
