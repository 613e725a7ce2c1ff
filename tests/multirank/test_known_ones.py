"""Batches whose masks mask something, or nothing, in turn: each microbatch has its own program."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import nn

import merak
from merak.check import Case, CheckOptions, Job, Layout
from merak.engine import local_programs
from merak.engine.local_programs import ProgramCache
from tests.multirank import memory_jobs
from tests.multirank.check_on import check_on
from tests.multirank.compare import assert_close
from tests.multirank.ranks import RankPool
from tests.multirank.training import (
    VOCABULARY,
    Outcome,
    Setup,
    Texts,
    Watch,
    alone,
    bert,
    llama,
    make_merak,
    make_reference,
)
from tests.tiers import slow

SEQUENCE = 8


def batch_of(step: int, samples: int) -> dict[str, torch.Tensor]:
    """Only the first samples have padding, on the left in one step, and in another none has."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(1, VOCABULARY, (samples, SEQUENCE), generator=generator)
    mask = torch.ones_like(ids)
    if step < 2:
        mask[:2, 5:] = 0
    if step == 1:
        mask = mask.flip(1)
    return {
        "input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("make", "layout"),
    [
        (llama, Layout(tp=2, pp=2)),
        slow(llama, Layout(dp=2, pp=2)),
        slow(bert, Layout(dp=2, tp=2)),
    ],
)
def test_as_in_one_process(pool: RankPool, make: Callable[[], nn.Module], layout: Layout) -> None:
    options = CheckOptions("1f1b", num_microbatches=3, steps=3, evaluate=layout.dp == 1)
    checked = Job(Case(make.__name__, make, batch_of), layout, options)
    check_on(pool, checked)


class SomePadded(Texts):
    """Most batches of four have no padding."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = super().__getitem__(index)
        if index % 12:
            ids = self.ids[index]
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        sample["labels"][9:] = -100
        return sample | {"attention_mask": torch.cat([torch.ones(9), torch.zeros(3)]).long()}


SETUP = Setup("llama", num_microbatches=2, arguments={"max_steps": 6, "seed": 3})
MASK = "attention_mask"


class ChangesValues:
    """A script's own values of the mask, long after the ranks have seen the batch."""

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        if MASK in inputs:
            inputs = {**inputs, MASK: inputs[MASK].clone()}
            inputs[MASK][:, -2:] = 0
        return inputs


def train(
    layout: tuple[int, int, int], cache: str, changes: bool
) -> tuple[Outcome, list[tuple[bool, bool]]]:
    """A job on this rank; and what was known of the mask of every program that a step asked for.

    It leaves out masks of padding as on a GPU.
    """
    import merak

    dp, tp, pp = layout
    mesh = merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    bases = (ChangesValues, merak.MerakTrainer) if changes else (merak.MerakTrainer,)
    trainer_class = type("Own", bases, {})
    data = SomePadded(SETUP.num_samples)
    trainer = make_merak(SETUP, dp, cache, train_dataset=data, trainer_class=trainer_class)
    outcome, known = Outcome(place=(mesh.replicas_rank, mesh.tp_rank, mesh.pp_rank)), []
    trainer.add_callback(Watch(outcome, lambda: dict(trainer.engine.parameters)))

    ask = ProgramCache.__call__

    def called(programs: ProgramCache, signature: Any, *how: bool) -> Any:
        mask = dict(signature)[MASK]
        known.append((mask.ones, "labels" in mask.ignored))
        return ask(programs, signature, *how)

    trainer.add_callback(_Begins(lambda: known.clear()))
    with (
        mock.patch.object(local_programs, "MASKED_AS_FAST", ()),
        mock.patch.object(ProgramCache, "__call__", called),
    ):
        trainer.train()
    assert trainer.engine._state.program_for._tries_padded
    outcome.final = {n: p.detach().clone() for n, p in trainer.engine.parameters.items()}
    outcome.shards = dict(trainer.engine.shards)
    return outcome, known


class _Begins(transformers.TrainerCallback):
    def __init__(self, then: Callable[[], None]) -> None:
        self.then = then

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.then()


def train_alone(changes: bool) -> Outcome:
    outcome = Outcome()
    with alone():
        bases = (ChangesValues, transformers.Trainer) if changes else (transformers.Trainer,)
        data, trainer_class = SomePadded(SETUP.num_samples), type("Own", bases, {})
        trainer = make_reference(SETUP, train_dataset=data, trainer_class=trainer_class)
        parameters = dict(trainer.model.named_parameters())  # type: ignore[union-attr]
        trainer.add_callback(Watch(outcome, lambda: parameters))
        trainer.train()
    outcome.final = {name: p.detach().clone() for name, p in parameters.items()}
    return outcome


@pytest.mark.parametrize(("layout", "changes"), [slow((2, 1, 2), False), ((2, 1, 1), True)])
def test_ranks_agree_on_what_they_know(
    pool: RankPool, layout: tuple[int, int, int], changes: bool, tmp_path: Path
) -> None:
    found = pool.run(train, layout[0] * layout[1] * layout[2], layout, str(tmp_path), changes)
    (expected,) = pool.run(train_alone, 1, changes)
    assert_close([outcome for outcome, _ in found], expected)
    for _, known in found:
        assert known == found[0][1]
        wanted = {(False, False)} if changes else {(True, True), (False, True)}
        assert set(known) == wanted


def of_unequal_replicas(dp: int) -> list[dict[str, torch.Tensor]]:
    """Parameters behind two steps: by Merak, whose replicas' first batches differ, and by torch."""
    mesh = merak.init(dp=dp, device="cpu")
    draws = torch.Generator().manual_seed(4)
    batches = []
    for length, padded in ((6, True), (9, False)):
        ids = torch.randint(1, 60, (2, length), generator=draws)
        mask = torch.ones_like(ids)
        mask[0, length - 2 * padded :] = 0
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": ids})

    def sgd(own: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(own, lr=0.1)

    models = [memory_jobs.llama(0.0) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    torch.manual_seed(0)
    for model in models:
        for number, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(number)
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    parallel = merak.parallelize(models[0], batches[mesh.dp_rank], optimizer=sgd)
    optimizer = sgd(models[1].parameters())
    for _ in range(2):
        parallel.step(batches[mesh.dp_rank])
        optimizer.zero_grad()
        sum(models[1](**batch).loss / dp for batch in batches).backward()
        optimizer.step()
    return [{n: p.detach().clone() for n, p in model.named_parameters()} for model in models]


def test_replicas_may_begin_with_other_lengths_and_padding(pool: RankPool) -> None:
    for found, expected in pool.run(of_unequal_replicas, 2, 2):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
