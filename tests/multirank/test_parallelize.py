"""`merak.parallelize` in a loop of one's own, against the same loop in one process."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from tests.multirank.compare import whole
from tests.multirank.ranks import RankPool
from tests.multirank.training import Layout, Outcome
from tests.shared_cache import not_shared
from tests.tiers import slow
from tests.unit.graph.tensor_parallel_cases import assert_gradients_equal

NUM_STEPS, BATCH = 4, 8


class Classifier(nn.Module):
    """Returns its loss: blocks of differing widths, a weight that two of them share."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Linear(6, 16)
        self.wide = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.narrow = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 16))
        self.again = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.again[0].weight = self.wide[0].weight
        self.last = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        h = torch.tanh(self.first(x))
        for block in (self.wide, self.narrow, self.again):
            h = h + block(h)
        logits = self.last(h)
        return {"loss": nn.functional.cross_entropy(logits, y), "logits": logits}


class Regressor(Classifier):
    """Returns logits; its loss is somebody else's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        y = torch.zeros(x.shape[0], dtype=torch.long, device=x.device)
        return super().forward(x, y)["logits"]


def squares(outputs: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = (outputs.sum(dim=1) - batch["target"]).square().mean()
    return loss


def batch_of(step: int, kind: str) -> dict[str, torch.Tensor]:
    """The batch of all replicas."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 6, generator=generator)
    if kind == "loss":
        return {"x": x, "y": torch.randint(0, 4, (BATCH,), generator=generator)}
    return {"x": x, "target": torch.randn(BATCH, generator=generator)}


def make_model(kind: str) -> nn.Module:
    return Classifier() if kind == "loss" else Regressor()


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


@not_shared()
def run_parallel(layout: Layout, kind: str, max_norm: float | None) -> Outcome:
    import merak

    dp, tp, pp = layout
    mesh = merak.init(dp=dp, tp=tp, pp=pp, device="cpu")

    def share(step: int) -> dict[str, torch.Tensor]:
        size = BATCH // dp
        start = mesh.dp_rank * size
        return {name: t[start : start + size] for name, t in batch_of(step, kind).items()}

    features = {"wide.0": merak.Column(), "wide.2": merak.Row()}
    features |= {"again.0": merak.Column(), "again.2": merak.Row()}
    parallel = merak.parallelize(
        make_model(kind),
        share(0),
        loss_fn=squares if kind == "loss_fn" else None,
        optimizer=adamw,
        num_microbatches=4 // dp,
        max_grad_norm=max_norm,
        **({"features": features} if tp > 1 else {}),
    )
    outcome = Outcome(place=(mesh.dp_rank, mesh.tp_rank, mesh.pp_rank))
    outcome.losses.append(parallel.evaluate(share(0)).item())
    for step in range(NUM_STEPS):
        outcome.losses.append(parallel.step(share(step)).item())
        if step == 0:
            found = parallel.engine.parameters.items()
            outcome.first = {n: p.grad.clone() for n, p in found if p.grad is not None}
    outcome.losses.append(parallel.evaluate(share(0)).item())
    outcome.final = {n: p.detach().clone() for n, p in parallel.engine.parameters.items()}
    outcome.shards = dict(parallel.engine.shards)
    assert dict(parallel.model.named_parameters()).keys() >= outcome.final.keys()
    return outcome


def run_alone(kind: str, max_norm: float | None) -> Outcome:
    model = make_model(kind)
    optimizer = adamw(model.parameters())
    outcome = Outcome()
    outcome.losses.append(_mean_loss(model, 0, kind).item())
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = torch.zeros(())
        for part in range(4):
            share = _loss(model, step, kind, part) / 4
            share.backward()
            loss += share.detach()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        outcome.losses.append(loss.item())
        if step == 0:
            named = model.named_parameters()
            outcome.first = {n: p.grad.clone() for n, p in named if p.grad is not None}
    outcome.losses.append(_mean_loss(model, 0, kind).item())
    outcome.final = {n: p.detach().clone() for n, p in model.named_parameters()}
    return outcome


def _loss(model: nn.Module, step: int, kind: str, part: int) -> torch.Tensor:
    size = BATCH // 4
    batch = {n: t[part * size : (part + 1) * size] for n, t in batch_of(step, kind).items()}
    loss: torch.Tensor
    if kind == "loss":
        loss = model(**batch)["loss"]
    else:
        loss = squares(model(batch["x"]), batch)
    return loss


@torch.no_grad()
def _mean_loss(model: nn.Module, step: int, kind: str) -> torch.Tensor:
    return torch.stack([_loss(model, step, kind, part) for part in range(4)]).mean()


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ((1, 1, 1), "loss_fn"), ((1, 1, 2), "loss"), slow((2, 1, 1), "loss_fn"),
        slow((1, 2, 1), "loss"), slow((2, 2, 2), "loss_fn"),
    ],
)  # fmt: skip
def test_a_loop_of_ones_own_equals_one_process(pool: RankPool, layout: Layout, kind: str) -> None:
    dp, tp, pp = layout
    max_norm = None if dp * tp == 1 else 0.5
    expected = run_alone(kind, max_norm)
    ranks = pool.run(run_parallel, dp * tp * pp, layout, kind, max_norm)
    for rank in ranks:
        assert rank.losses == ranks[0].losses
    assert ranks[0].losses == pytest.approx(expected.losses, rel=1e-5)
    assert_gradients_equal(whole(ranks, "first"), expected.first)
    if dp * tp == 1:
        final = whole(ranks, "final")
        for name, value in expected.final.items():
            assert torch.equal(final[name], value), name


def train_two_models() -> tuple[list[float], list[float]]:
    """Two models in one job, a step of one that fails in between."""
    import merak

    merak.init(pp=2, device="cpu")
    one = merak.parallelize(Classifier(), batch_of(0, "loss"), optimizer=adamw)
    other = merak.parallelize(Classifier(), batch_of(0, "loss"), optimizer=adamw)
    losses: tuple[list[float], list[float]] = ([], [])
    for step in range(3):
        losses[0].append(one.step(batch_of(step, "loss")).item())
        with pytest.raises(KeyError):  # on both ranks, before anything is sent
            other.engine.train_step(0, [_columns(other, step)], [{}])
        losses[1].append(other.step(batch_of(step, "loss")).item())
    return losses


def _columns(parallel: Any, step: int) -> Any:
    from merak.data import signature

    return signature(copy.copy(batch_of(step, "loss"))).columns


def test_two_models_train_side_by_side(pool: RankPool) -> None:
    for one, other in pool.run(train_two_models, 2):
        assert one == other
        assert len(set(one)) == 3
