"""A loss that reads the trainer, or values of tensors, is that of one process on several ranks."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer

import merak
from tests.multirank.ranks import RankPool
from tests.multirank.training import (
    Layout,
    Setup,
    Texts,
    alone,
    make_merak,
    make_reference,
)
from tests.tiers import slow

SETUP = Setup(
    "gpt2",
    padded=False,
    arguments={"max_steps": 3, "learning_rate": 1e-2, "warmup_steps": 2, "weight_decay": 0.1},
)


class Weighs:
    """Weighs its terms by the learning rate, the step and the epoch."""

    def compute_loss(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, **of_step: Any
    ) -> Any:
        found = model(input_ids=inputs["input_ids"])
        labels = inputs["labels"][:, 1:].flatten()
        loss = nn.functional.cross_entropy(found.logits[:, :-1].flatten(0, 1), labels)
        rate = self.optimizer.param_groups[0]["lr"] + self.lr_scheduler.get_last_lr()[0]
        loss = loss + 10 * rate * found.logits.square().mean()
        loss = loss * (1 + self.state.global_step / self.state.max_steps)
        return (loss, found) if return_outputs else loss


class Own(Weighs, merak.MerakTrainer):
    """In a job."""


class Their(Weighs, Trainer):
    """In one process."""


class Reads(Weighs):
    """Reads values of tensors, and does what it wants with them."""

    def compute_loss(
        self: Any,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        found = model(input_ids=inputs["input_ids"])
        logits, labels = found.logits[:, :-1], inputs["labels"][:, 1:]
        each = nn.functional.cross_entropy(logits.mT, labels, reduction="none")
        loss = each.mean() if num_items_in_batch is None else each.sum() / num_items_in_batch
        seen = vars(self).setdefault("seen", defaultdict(list))[
            "train" if model.training else "eval"
        ]
        right = (logits.argmax(-1) == labels) & (labels > 3)
        count = (labels > 3).sum()
        seen.append((right.sum() / count).item() if count > 0 else 0.0)
        seen.append(self.accelerator.gather_for_metrics(logits.square().mean()).item())
        seen.append(labels.sum(1).tolist())
        if self.is_world_process_zero():  # which is not to change what other ranks compute
            self.log({"own": loss.item()})
        seen.append(loss.detach())
        return (loss, found) if return_outputs else loss


class Decides(Reads):
    """Takes the loss of some samples alone, if there are any, and calls the model twice."""

    @merak.eager_loss
    def compute_loss(
        self: Any,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        with torch.no_grad():
            before = model(input_ids=inputs["input_ids"].flip(1)).logits.mean((1, 2))
        found = model(input_ids=inputs["input_ids"])
        labels = inputs["labels"][:, 1:]
        each = nn.functional.cross_entropy(found.logits[:, :-1].mT, labels, reduction="none")
        seen = vars(self).setdefault("seen", defaultdict(list))[
            "train" if model.training else "eval"
        ]
        chosen = each[before > before.median()]
        terms = [row.mean() for row in chosen if row.max() > row.mean() * 1.5]
        seen.append([len(terms), len(chosen), chosen.sum().item(), labels.sum(1).tolist()])
        if self.is_world_process_zero():  # which is not to change what other ranks compute
            self.log({"own": each.mean().item()})
        loss = sum(terms, each.mean() if num_items_in_batch is None else each.sum() / 200)
        return (loss, found) if return_outputs else loss


class OwnDecides(Decides, merak.MerakTrainer):
    """In a job."""


class TheirDecides(Decides, Trainer):
    """In one process."""


class OwnReads(Reads, merak.MerakTrainer):
    """In a job."""


class TheirReads(Reads, Trainer):
    """In one process."""


READS = Setup(
    "gpt2",
    num_microbatches=4,
    num_samples=21,
    padded=False,
    arguments={
        "max_steps": 3, "learning_rate": 0.1, "optim": "sgd", "eval_strategy": "steps",
        "eval_steps": 2, "per_device_eval_batch_size": 2,
    },
)  # fmt: skip
EVALUATED = {"eval_dataset": Texts(5, padded=False)}


def reads(trainer: Any) -> dict[str, Any]:
    """What a loss has read in every microbatch, in order, and has logged."""
    trainer.train()
    logs = [log["own"] for log in trainer.state.log_history if "own" in log]
    return {mode: list(seen) for mode, seen in trainer.seen.items()} | {"logs": logs}


def losses(trainer: Any) -> list[float]:
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def train(layout: Layout, cache: str) -> tuple[list[float], list[dict[str, Any]]]:
    dp, tp, pp = layout
    merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    own = [
        reads(make_merak(READS, dp, cache, trainer_class=cls, **EVALUATED))
        for cls in (OwnReads, OwnDecides)
    ]
    return losses(make_merak(SETUP, dp, cache, trainer_class=Own)), own


@pytest.mark.parametrize("layout", [(1, 1, 2), slow((1, 2, 1)), slow((2, 1, 1))])
def test_every_step_has_its_own(pool: RankPool, cache: str, layout: Layout) -> None:
    with alone():
        expected = losses(make_reference(SETUP, trainer_class=Their))
        has_read = [
            reads(make_reference(READS, trainer_class=cls, **EVALUATED))
            for cls in (TheirReads, TheirDecides)
        ]
    assert len(expected) == 3
    assert [[len(own[mode]) for mode in ("train", "eval")] for own in has_read] == [
        [40, 24],
        [10, 6],
    ]
    for rank, (found, own) in enumerate(pool.run(train, 2, layout, cache)):
        if layout[0] == 1:  # replicas' own means are averaged
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        for one, wanted in zip(own, has_read, strict=True):
            logs = wanted["logs"] if rank == 0 else []
            torch.testing.assert_close(one, wanted | {"logs": logs}, rtol=1e-3, atol=1e-4)
