"""Collectives in a model's forward or loss: as one process with the replicas' larger batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import merak
from merak.core import mesh as meshes
from tests.multirank import collective_models as models
from tests.multirank.ranks import RankPool
from tests.multirank.training import Layout

SIZE, NUM_MICROBATCHES, NUM_STEPS = 3, 2, 3
"""Samples of a replica's microbatch, and how many of these a step has."""


@dataclass(frozen=True)
class Case:
    """A training.

    Args:
        model: makes it.
        loss: makes its loss, of the rank and number of replicas; None where the model has it.
        columns: of a batch.
    """

    model: Callable[[], nn.Module]
    loss: Callable[..., Any] | None = None
    of_loss: dict[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """Losses of steps, and on rank 0 what each has made of parameters, by its gradients alone."""

    losses: list[float] = field(default_factory=list)
    states: list[dict[str, torch.Tensor]] = field(default_factory=list)


class Loss(nn.Module):
    """A loss of embeddings as a loss function of outputs and batch."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, outputs: dict[str, torch.Tensor], batch: Any) -> torch.Tensor:
        found: torch.Tensor = self.inner(outputs["image"], outputs["text"], outputs["scale"])
        return found


CASES = {
    "clip": Case(models.Clip, models.ClipLoss, {"gather_with_grad": True}),
    "local clip": Case(
        models.Clip,
        models.ClipLoss,
        {"gather_with_grad": True, "local_loss": True, "cache_labels": True},
    ),
    "siglip": Case(models.Clip, models.SigLipLoss),
    "siglip by sums": Case(models.Clip, models.SigLipLoss, {"dist_impl": "reduce"}),
    "detr": Case(models.Detector),
    "dino": Case(models.Dino),
    "every call": Case(models.EveryCall),
    "vq": Case(models.QuantizedAutoencoder),
}


def rows_of(step: int, microbatch: int, dp: int) -> dict[str, torch.Tensor]:
    """Samples of all replicas in a microbatch, in the replicas' order."""
    generator = torch.Generator().manual_seed(10 * step + microbatch)
    shape = (dp * SIZE, models.WIDTH)
    return {name: torch.randn(shape, generator=generator) for name in ("x", "y")}


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def loss_of(case: Case, rank: int, dp: int) -> Any:
    if case.loss is None:
        return None
    return Loss(case.loss(rank=rank, world_size=dp, **case.of_loss))


def train(layout: Layout, names: list[str]) -> dict[str, Outcome]:
    dp, tp, pp = layout
    mesh = merak.init(dp=dp, tp=tp, pp=pp, device="cpu")

    def own(step: int) -> dict[str, torch.Tensor]:
        found = [rows_of(step, number, dp) for number in range(NUM_MICROBATCHES)]
        start = mesh.dp_rank * SIZE
        return {n: torch.cat([one[n][start : start + SIZE] for one in found]) for n in found[0]}

    outcomes = {}
    for name in names:
        case = CASES[name]
        parallel = merak.parallelize(
            case.model(), own(0), loss_fn=loss_of(case, mesh.dp_rank, dp), optimizer=sgd,
            num_microbatches=NUM_MICROBATCHES,
        )  # fmt: skip
        outcomes[name] = outcome = Outcome()
        for step in range(NUM_STEPS):
            outcome.losses.append(parallel.step(own(step)).item())
            outcome.states.append(parallel.engine.gather_state_dict())
    return outcomes


def in_layouts(jobs: list[tuple[Layout, list[str]]]) -> list[dict[str, Outcome]]:
    """Outcomes of all layouts, one after another, in one job of ranks."""
    found = []
    for layout, names in jobs:
        meshes.reset()
        found.append(train(layout, names))
    return found


def alone(case: Case, dp: int) -> Outcome:
    """The same training in one process with the larger batch."""
    model, loss_fn = case.model(), loss_of(case, 0, 1)
    optimizer = sgd(model.parameters())
    outcome = Outcome()
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        total = 0.0
        for number in range(NUM_MICROBATCHES):
            batch = rows_of(step, number, dp)
            made = model(**batch)
            loss = (made["loss"] if loss_fn is None else loss_fn(made, batch)) / NUM_MICROBATCHES
            loss.backward()
            total += loss.item()
        optimizer.step()
        outcome.losses.append(total)
        outcome.states.append({n: t.detach().clone() for n, t in model.state_dict().items()})
    return outcome


JOBS: list[tuple[Layout, list[str]]] = [
    ((2, 1, 2), list(CASES)),
    ((2, 2, 1), ["local clip", "every call", "dino", "vq"]),
    ((1, 2, 2), ["clip", "detr", "every call"]),
]


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_as_one_process_with_the_larger_batch(pool: RankPool) -> None:
    by_rank = pool.run(in_layouts, 4, JOBS)
    for number, (layout, names) in enumerate(JOBS):
        for name in names:
            expected = alone(CASES[name], layout[0])
            for rank, outcomes in enumerate(by_rank):
                expect_equal(outcomes[number][name], expected, f"{name} {layout} rank {rank}")
            assert by_rank[0][number][name].states[0]


def expect_equal(found: Outcome, expected: Outcome, what: str) -> None:
    """Equal but for sums in another order."""

    def said(text: str) -> str:
        return f"{what}: {text}"

    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5, msg=said)
    close(found.losses, expected.losses)
    for mine, whole in zip(found.states, expected.states, strict=True):
        if mine:
            close(mine, whole)
