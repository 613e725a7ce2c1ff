"""Collectives in a model's forward or loss: as one process with the replicas' larger batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import merak
from merak.core import mesh as meshes
from tests.multirank import collective_models as models
from tests.multirank.ranks import RankPool
from tests.tiers import slow

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")

SIZE, NUM_MICROBATCHES, NUM_STEPS = 3, 2, 3
"""Samples of a replica's microbatch, and how many of these a step has."""


Degrees = tuple[int | None, int | None, int | None, int]
"""dp, tp, pp and cp; None for one that the plan chooses."""


@dataclass(frozen=True)
class Case:
    """A training.

    Args:
        model: makes it.
        loss: makes its loss, of the rank and number of replicas; None where the model has it.
        of_loss: further arguments of it.
        reference: makes the loss of one process, of the number of replicas; None for the same one.
        evaluates: whether it runs in an evaluation, too, where no replicas meet.
        decides: whether values decide the loss, so that it runs as Python.
    """

    model: Callable[[], nn.Module]
    loss: Callable[..., Any] | None = None
    of_loss: dict[str, Any] = field(default_factory=dict)
    reference: Callable[[int], nn.Module] | None = None
    evaluates: bool = False
    decides: bool = False


@dataclass
class Outcome:
    """Losses of steps, and on rank 0 what each has made of parameters, by its gradients alone.

    Args:
        dp: the number of replicas.
        num_microbatches: of each of them.
    """

    dp: int
    num_microbatches: int
    losses: list[float] = field(default_factory=list)
    states: list[dict[str, torch.Tensor]] = field(default_factory=list)
    evaluated: float = 0.0


class Loss(nn.Module):
    """A loss of embeddings as a loss function of outputs and batch."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, outputs: dict[str, torch.Tensor], batch: Any) -> torch.Tensor:
        found: torch.Tensor = self.inner(outputs["image"], outputs["text"], outputs["scale"])
        return found


class Decides(Loss):
    """Such a loss of samples that values select."""

    def forward(self, outputs: dict[str, torch.Tensor], batch: Any) -> torch.Tensor:
        loss = super().forward(outputs, batch)
        rows = outputs["image"]
        chosen = rows[rows.sum(1) > 0]
        number = torch.tensor(float(len(chosen)))
        if models.is_dist_avail_and_initialized():
            models.dist.all_reduce(number)
        number = (number / models.get_world_size()).clamp(min=1)
        return loss * 2 + chosen.square().sum() / number.item() if loss.item() > 1 else loss


CASES = {
    "clip": Case(models.Clip, models.ClipLoss, {"gather_with_grad": True}, evaluates=True),
    "clip without gradients": Case(models.Clip, models.ClipLoss, {}, models.ClipOfReplicas),
    "local clip": Case(
        models.Clip,
        models.ClipLoss,
        {"gather_with_grad": True, "local_loss": True, "cache_labels": True},
    ),
    "eager clip": Case(
        models.Clip, models.ClipLoss, {"gather_with_grad": True}, evaluates=True, decides=True
    ),
    "siglip": Case(models.Clip, models.SigLipLoss),
    "siglip by sums": Case(models.Clip, models.SigLipLoss, {"dist_impl": "reduce"}),
    "detr": Case(models.Detector, evaluates=True),
    "dino": Case(models.Dino, evaluates=True),
    "every call": Case(models.EveryCall),
    "tokens": Case(models.Tokens),
    "vq": Case(models.QuantizedAutoencoder, evaluates=True),
}


Rows = dict[str, torch.Tensor]


def rows_of(step: int, number: int, num_samples: int) -> Rows:
    """Samples of a step."""
    generator = torch.Generator().manual_seed(10 * step + number)
    shape = (num_samples, models.WIDTH)
    return {name: torch.randn(shape, generator=generator) for name in ("x", "y")}


def parts_of(rows: Rows, num_parts: int) -> list[Rows]:
    """Rows in so many equal parts, one behind the other."""
    parts = {name: rows[name].chunk(num_parts) for name in rows}
    return [{name: parts[name][i] for name in parts} for i in range(num_parts)]


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def loss_of(case: Case, rank: int, dp: int) -> Any:
    if case.loss is None:
        return None
    inner = case.loss(rank=rank, world_size=dp, **case.of_loss)
    return merak.eager_loss(Decides(inner)) if case.decides else Loss(inner)


def train(layout: Degrees, names: list[str]) -> dict[str, Outcome]:
    """Train in a layout, each model in the one that is fastest where a degree is open."""
    dp, tp, pp, cp = layout
    plan = "auto" if None in layout else None
    num_samples = (dp or 4) * SIZE * NUM_MICROBATCHES

    def own(step: int) -> Rows:
        mesh = meshes.current_mesh()
        return parts_of(rows_of(step, 0, num_samples), mesh.dp)[mesh.dp_rank]

    outcomes = {}
    for name in names:
        meshes.reset()
        mesh = merak.init(dp=dp, tp=tp, pp=pp, cp=cp, plan=plan, device="cpu")
        case = CASES[name]
        rows = parts_of(rows_of(0, 0, num_samples), dp or 4)[0]
        searched = {"cluster": "a100:4"} if plan else {"num_microbatches": NUM_MICROBATCHES}
        parallel = merak.parallelize(
            case.model(), rows, loss_fn=loss_of(case, mesh.dp_rank, dp or 4), optimizer=sgd,
            **searched,
        )  # fmt: skip
        outcomes[name] = outcome = Outcome(meshes.current_mesh().dp, parallel.num_microbatches)
        if case.evaluates:
            outcome.evaluated = parallel.evaluate(own(0)).item()
        for step in range(NUM_STEPS):
            outcome.losses.append(parallel.step(own(step)).item())
            outcome.states.append(parallel.engine.gather_state_dict())
    return outcomes


def in_layouts(jobs: list[tuple[Degrees, list[str]]]) -> list[dict[str, Outcome]]:
    """Outcomes of all layouts, one after another, in one job of ranks."""
    return [train(layout, names) for layout, names in jobs]


def alone(case: Case, dp: int, num_microbatches: int, num_samples: int) -> Outcome:
    """The same training in one process with the larger batch."""
    model, loss_fn = case.model(), loss_of(case, 0, 1)
    optimizer = sgd(model.parameters())
    outcome = Outcome(dp, num_microbatches)

    def microbatches(step: int) -> list[list[Rows]]:
        """Of every replica."""
        replicas = parts_of(rows_of(step, 0, num_samples), dp)
        return [parts_of(rows, num_microbatches) for rows in replicas]

    def loss_at(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        made = model(**batch)
        loss: torch.Tensor = made["loss"] if loss_fn is None else loss_fn(made, batch)
        return loss

    if case.evaluates:
        model.eval()
        parts = [part for rows in microbatches(0) for part in rows]
        outcome.evaluated = sum(loss_at(part).item() for part in parts) / len(parts)
        model.train()
    if case.reference is not None:
        loss_fn = Loss(case.reference(dp))
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        total = 0.0
        for met in zip(*microbatches(step), strict=True):
            loss = loss_at({n: torch.cat([one[n] for one in met]) for n in met[0]})
            loss = loss / num_microbatches
            loss.backward()
            total += loss.item()
        optimizer.step()
        outcome.losses.append(total)
        outcome.states.append({n: t.detach().clone() for n, t in model.state_dict().items()})
    return outcome


ESSENTIAL = ["clip", "dino", "every call", "vq"]
JOBS: list[tuple[Degrees, list[str]]] = [
    ((2, 1, 2, 1), ESSENTIAL),
    ((2, 2, 1, 1), ["every call"]),
    ((2, 1, 1, 2), ["tokens"]),
]
ALL_JOBS: list[tuple[Degrees, list[str]]] = [
    ((2, 1, 2, 1), [name for name in CASES if name not in ESSENTIAL]),
    ((2, 2, 1, 1), ["local clip", "dino", "vq", "eager clip"]),
    ((1, 2, 2, 1), ["clip", "detr", "every call", "eager clip"]),
    ((2, None, None, 1), ["every call", "clip", "dino", "vq"]),
    ((None, None, None, 1), ["clip", "every call", "detr", "eager clip"]),
    ((None, 1, 2, 1), ["dino"]),
    ((1, 1, 2, 2), ["tokens"]),
    ((2, 2, 1, 1), ["tokens"]),
]


@pytest.mark.parametrize("jobs", [pytest.param(JOBS, id="essential"), slow(ALL_JOBS, id="all")])
def test_as_one_process_with_the_larger_batch(
    pool: RankPool, jobs: list[tuple[Degrees, list[str]]]
) -> None:
    by_rank = pool.run(in_layouts, 4, jobs)
    for number, (layout, names) in enumerate(jobs):
        num_samples = (layout[0] or 4) * SIZE * NUM_MICROBATCHES
        for name in names:
            first = by_rank[0][number][name]
            expected = alone(CASES[name], first.dp, first.num_microbatches, num_samples)
            for rank, outcomes in enumerate(by_rank):
                expect_equal(outcomes[number][name], expected, f"{name} {layout} rank {rank}")
            assert by_rank[0][number][name].states[0]


def expect_equal(found: Outcome, expected: Outcome, what: str) -> None:
    """Equal but for sums in another order."""

    def said(text: str) -> str:
        return f"{what}: {text}"

    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5, msg=said)
    assert (found.dp, found.num_microbatches) == (expected.dp, expected.num_microbatches)
    close(found.losses, expected.losses)
    close(found.evaluated, expected.evaluated)
    for mine, whole in zip(found.states, expected.states, strict=True):
        if mine:
            close(mine, whole)


class Contrasts:
    """A contrastive loss of a trainer, with an accuracy that it reads, or with the rank."""

    by_rank = False

    def compute_loss(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, **of_step: Any
    ) -> Any:
        found = model(**inputs)
        image, text, rank = found["image"], found["text"], 0
        every = torch.cat(models.gathered(text))
        if self.by_rank and models.is_dist_avail_and_initialized():
            rank = models.dist.get_rank()
        elif models.is_dist_avail_and_initialized():
            image = torch.cat(models.gathered(image))
        labels = torch.arange(len(image)) + rank * len(image)
        logits = found["scale"] * image @ every.T
        loss = nn.functional.cross_entropy(logits, labels)
        if not self.by_rank:
            seen = vars(self).setdefault("seen", [])
            seen.append((logits.argmax(-1) == labels).float().mean().item())
        return (loss, found) if return_outputs else loss


class DecidedContrasts(Contrasts):
    """One of which what it reads decides."""

    @merak.eager_loss
    def compute_loss(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, **of_step: Any
    ) -> Any:
        loss = super().compute_loss(model, inputs, **of_step)
        return loss * 2 if self.seen[-1] < 0.5 or loss.item() > 2 else loss


Kinds = list[tuple[Any, bool]]
"""Trainers, and whether each reads the rank."""


class Own(Contrasts, merak.MerakTrainer):
    """In a job."""


class Their(Contrasts, transformers.Trainer):
    """In one process."""


class OwnDecided(DecidedContrasts, merak.MerakTrainer):
    """In a job."""


class TheirDecided(DecidedContrasts, transformers.Trainer):
    """In one process."""


OWN: Kinds = [(Own, False), (Own, True), (OwnDecided, False)]
THEIR: Kinds = [(Their, False), (Their, True), (TheirDecided, False)]


def trainings(dp: int, folder: str, kinds: Kinds) -> list[tuple[list[float], list[float]]]:
    """What trainers have logged and read, without the rank and with it, and decided by values."""
    rows = [rows_of(step, number, 2 * SIZE) for step in range(3) for number in range(2)]
    samples = [{n: one[n][i] for n in one} for one in rows for i in range(2 * SIZE)]
    found = []
    for kind, by_rank in kinds:
        is_own = issubclass(kind, merak.MerakTrainer)
        args = (merak.MerakArguments if is_own else transformers.TrainingArguments)(
            folder, max_steps=3, gradient_accumulation_steps=NUM_MICROBATCHES, logging_steps=1,
            per_device_train_batch_size=2 * SIZE // dp, report_to=[], disable_tqdm=True,
            use_cpu=True, remove_unused_columns=False, dataloader_drop_last=True,
            save_strategy="no", log_level="error", label_names=[],
        )  # fmt: skip
        trainer = kind(models.Clip(), args, train_dataset=samples)
        trainer.by_rank = by_rank
        trainer.train()
        logs = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        found.append((logs, vars(trainer).get("seen", [])))
    return found


def trained(folder: str) -> list[tuple[list[float], list[float]]]:
    merak.init(dp=2, pp=2, device="cpu")
    return trainings(2, folder, OWN)


def test_so_are_losses_of_a_trainer(pool: RankPool, tmp_path: Path) -> None:
    expected = [  # a loss is called, and reads, for each replica's microbatch
        (losses, [one for one in seen for _ in range(2)])
        for losses, seen in trainings(1, str(tmp_path), THEIR)
    ]
    for found in pool.run(trained, 4, str(tmp_path)):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
