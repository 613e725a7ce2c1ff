"""A plan compared with the first steps of its job, on ranks of which one is slow by design."""

from __future__ import annotations

import logging
import time
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import TrainerCallback

import merak
from merak.core.errors import ArgumentsError
from merak.core.mesh import current_mesh
from merak.engine.planning import replan
from merak.engine.planning.replan import Replanner
from merak.engine.segments import run
from merak.plan.price.candidate import Candidate
from tests.multirank.training import Setup, Texts, arguments_of, gpt2, model_of

SETUP = Setup(
    "gpt2",
    arguments={"max_steps": 9, "save_strategy": "steps", "save_steps": 3, "log_level": "info"},
)
SLEEP_S = 0.02
"""In every forward of a segment on the slow rank; the segments of this model take far less."""

FORWARD = run.forward

EMPTY = 12
"""Seed of a job whose model has no weights."""


class Slow(TrainerCallback):
    """Makes the segments of a rank slow, and counts those that it runs, and losses, by step."""

    def __init__(self) -> None:
        self.count = 0
        self.counts: list[int] = []
        self.losses: list[float] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        time.sleep(SLEEP_S)
        return FORWARD(*args, **kwargs)

    def on_log(self, *args: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "loss" in logs:
            self.losses.append(logs["loss"])

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.counts.append(self.count)
        self.count = 0


class StopAt(TrainerCallback):
    """Ends a job behind a step, as if its machines had gone."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


def announcements() -> list[str]:
    """What rank 0 announces from now on; it grows."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("merak.core.announce").addHandler(handler)
    return lines


def train(
    folder: str, given: dict[str, Any], *callbacks: TrainerCallback
) -> tuple[list[str], list[float], list[int], dict[str, torch.Tensor]]:
    """What is said, losses, segments that the last rank runs in every step, and last weights."""
    merak.init(plan="auto", device="cpu")
    world_size = current_mesh().world_size
    lines, slow = announcements(), Slow()
    chosen = {
        "per_device_train_batch_size": 2, "global_batch": 8, "recompute": "off", "trace_cache": "",
        "cluster": f"a100:{world_size}",
    }  # fmt: skip
    args = merak.MerakArguments(**arguments_of(SETUP, folder) | chosen | given)
    with merak.empty_weights() if given.get("seed") == EMPTY else nullcontext():
        model = model_of(SETUP)
    trainer = merak.MerakTrainer(
        model=model, args=args, train_dataset=Texts(64), eval_dataset=Texts(8)
    )
    for callback in (slow, *callbacks):
        trainer.add_callback(callback)
    is_slow = current_mesh().rank == world_size - 1
    with mock.patch.object(run, "forward", slow.forward if is_slow else FORWARD):
        trainer.train()
    assert trainer.mesh == current_mesh()
    return lines, slow.losses, slow.counts, trainer.gather_state_dict()


def test_a_job_goes_on_in_the_layout_that_its_slow_rank_asks_for(pool, tmp_path: Path) -> None:
    stays, moves = ({"replan": replan} for replan in (False, True))
    (said, losses, _, weights), slow = pool.run(train, 2, str(tmp_path / "stays"), stays)
    assert any(line.startswith("plan: a step takes ") for line in said)
    assert any(
        line.endswith(" replan=True goes on in it behind the next checkpoint") for line in said
    )
    assert len({*slow[2]}) == 1
    (said, moved, _, own_weights), slow = pool.run(train, 2, str(tmp_path / "moves"), moves)
    (line,) = (line for line in said if line.startswith("plan: goes on from "))
    assert "checkpoint-6 in dp=1 " in line
    # Behind the sixth step it has fewer segments; how many follows from the machine's speed.
    assert len({*slow[2][:6]}) == 1 and max(slow[2][6:]) < slow[2][0]
    assert moved == pytest.approx(losses, rel=1e-4)
    for name, value in weights.items():
        assert torch.allclose(own_weights[name], value, atol=1e-3), name


def test_a_job_that_comes_back_with_other_ranks_is_planned_for_them(pool, tmp_path: Path) -> None:
    losses = pool.run(train, 1, str(tmp_path / "one"), {})[0][1]
    folder, again = str(tmp_path / "three"), {"resume_from_checkpoint": "auto"}
    found = []
    for step, world_size in ((3, 2), (6, 1), (9, 2)):
        stop = StopAt(step)
        said, own, _, _ = pool.run(train, world_size, folder, again, stop)[0]
        assert any(line.startswith("plan: dp=") for line in said)
        found += own
    assert found == pytest.approx(losses, rel=1e-4)


def resume_alone(folder: str) -> list[str]:
    """What a job warns of that goes on from a checkpoint of two ranks, without `global_batch`."""
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("merak.trainer.checkpoints.saving").addHandler(handler)
    train(folder, {"global_batch": None, "resume_from_checkpoint": "auto", "max_steps": 4})
    return warned


@pytest.mark.slow
def test_other_samples_in_a_step_are_warned_of(pool, tmp_path: Path) -> None:
    pool.run(train, 2, str(tmp_path), {"max_steps": 3})
    (warned,) = pool.run(resume_alone, 1, str(tmp_path))
    assert any("a job with 8 samples a step, and this one has 2, " in line for line in warned)


LAYOUTS = (
    Candidate(tp=2, microbatch=2, num_microbatches=4, recompute="full"),
    Candidate(pp=2, microbatch=1, num_microbatches=8, schedule="zero_bubble_h1", partition=(4, 2)),
)


FORGET = merak.MerakTrainer.forget_layout


def forget(trainer: Any) -> None:
    """Forget a layout, and hold nothing of it: there may be no memory for two."""
    made = [weakref.ref(trainer.engine), weakref.ref(trainer.optimizer.optimizer)]
    FORGET(trainer)
    assert [own() for own in made] == [None, None]


def train_in_layouts(folder: str, given: dict[str, Any]) -> Any:
    """Train in these layouts one after another, whatever was measured."""
    left = iter((*LAYOUTS, None))
    with (
        mock.patch.object(Replanner, "faster", lambda *_: next(left)),
        mock.patch.object(replan, "FIRST_STEPS", 1),
        mock.patch.object(merak.MerakTrainer, "forget_layout", forget),
        mock.patch(f"{__name__}.SLEEP_S", 0),
    ):
        found = train(folder, {"replan": True, **given})
    mesh = current_mesh()
    assert (mesh.dp, mesh.tp, mesh.pp) == (1, 1, 2)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        {"zero": 3, "max_grad_norm": 1.0},
        {"seed": EMPTY},
        {"async_save": False, "eval_strategy": "steps", "save_total_limit": 1},
    ],
    ids=["zero", "empty", "eval"],
)
def test_a_job_goes_on_from_any_layout(pool, tmp_path: Path, given: dict[str, Any]) -> None:
    pinned = {"zero": 0, **given}
    said, moved, _, own = pool.run(train_in_layouts, 2, str(tmp_path / "moves"), pinned)[0]
    lines = [line for line in said if line.startswith("plan: goes on from ")]
    assert ["checkpoint-3 in dp=1 tp=2" in lines[0], "checkpoint-6 in dp=1" in lines[1]] == [
        True
    ] * 2
    _, losses, _, weights = pool.run(train, 2, str(tmp_path / "stays"), pinned)[0]
    assert moved == pytest.approx(losses, rel=1e-4)
    for name, value in weights.items():
        assert torch.allclose(own[name], value, atol=1e-3), name


def loop() -> list[str]:
    """What a loop of one's own says, whose last rank is slow."""
    mesh = merak.init(plan="auto", device="cpu")
    logging.getLogger("merak.core.announce").setLevel(logging.INFO)
    lines, slow = announcements(), Slow()
    torch.manual_seed(5)
    texts = Texts(8, padded=False)
    batch = {name: torch.stack([own[name] for own in texts]) for name in texts[0]}
    model = merak.parallelize(
        gpt2(),
        {name: column[:4] for name, column in batch.items()},
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        cluster="a100:2",
        recompute="off",
    )
    laid = current_mesh()
    rows = slice(laid.dp_rank * 8 // laid.dp, (laid.dp_rank + 1) * 8 // laid.dp)
    with mock.patch.object(run, "forward", slow.forward if mesh.rank == 1 else FORWARD):
        for _ in range(replan.FIRST_STEPS + 1):
            model.step({name: column[rows] for name, column in batch.items()})
    return lines


@pytest.mark.slow
def test_a_loop_of_ones_own_says_which_layout_would_be_faster(pool) -> None:
    said, others = pool.run(loop, 2)
    (line,) = (line for line in said if line.endswith(" goes on in it from a checkpoint"))
    assert line.startswith("plan: dp=1 ") and not others


def loop_in_layouts(folder: str, num_layouts: int) -> tuple[Any, ...]:
    """Losses of a loop of one's own in so many layouts behind its own, and its last weights."""
    merak.init(plan="auto", device="cpu")
    left = iter((*LAYOUTS[:num_layouts], None))
    torch.manual_seed(5)
    texts = Texts(8, padded=False)
    batch = {name: torch.stack([own[name] for own in texts]) for name in texts[0]}
    batch["labels"] = batch["input_ids"]  # as many in every microbatch, whose means are averaged
    losses, degrees = [], []
    with (
        mock.patch.object(Replanner, "faster", lambda *_: next(left)),
        mock.patch.object(replan, "FIRST_STEPS", 1),
    ):
        model = merak.parallelize(
            gpt2(),
            {name: column[:4] for name, column in batch.items()},
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
            cluster="a100:2",
            replan=True,
            offload_optimizer="cpu",
            max_grad_norm=1.0,
        )
        for step in range(3):
            for _ in range(2):
                laid = current_mesh()
                rows = slice(laid.dp_rank * 8 // laid.dp, (laid.dp_rank + 1) * 8 // laid.dp)
                losses.append(
                    float(model.step({name: column[rows] for name, column in batch.items()}))
                )
            degrees.append((laid.dp, laid.tp, laid.pp))
            model.save_checkpoint(f"{folder}/{step}")
            schedule = torch.optim.lr_scheduler.LambdaLR(model.optimizer, lambda _: 1.0)
            before, engine = model, weakref.ref(model.engine)
            model = model.replanned(f"{folder}/{step}")
            if model is not before:  # of which nothing is held but what the loop holds
                assert engine() is None and not schedule.optimizer.state
                with pytest.raises(ArgumentsError, match="has laid this model out anew"):
                    before.step(batch)
    assert model.num_steps == 6
    return degrees, losses, model.gather_state_dict()


@pytest.mark.slow
def test_a_loop_of_ones_own_goes_on_from_any_layout(pool, tmp_path: Path) -> None:
    (degrees, moved, own), _ = pool.run(loop_in_layouts, 2, str(tmp_path / "moves"), 2)
    assert degrees[1:] == [(own.dp, own.tp, own.pp) for own in LAYOUTS]
    (_, losses, weights), _ = pool.run(loop_in_layouts, 2, str(tmp_path / "stays"), 0)
    assert moved == pytest.approx(losses, rel=1e-4)
    for name, value in weights.items():
        assert torch.allclose(own[name], value, atol=1e-3), name


def refused() -> list[str]:
    """Sentences of what a loop cannot have."""
    merak.init(device="cpu")
    batch = {"input_ids": torch.ones(2, 4, dtype=torch.int64)}
    batch["labels"] = batch["input_ids"]
    model, found = gpt2(), []
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    for given in ({"optimizer": made}, {"optimizer": made, "plan": "auto"}):
        with pytest.raises(ArgumentsError) as caught:
            merak.parallelize(model, batch, replan=True, **given)
        found.append(str(caught.value))
    return found


def test_a_loop_that_cannot_go_on_elsewhere_is_refused(pool) -> None:
    ((searched, made),) = pool.run(refused, 1)
    assert "set plan='auto', or leave it out" in searched
    assert "give a factory: optimizer=lambda own" in made
