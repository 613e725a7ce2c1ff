"""A plan compared with the first steps of its job, on ranks of which one is slow by design."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import TrainerCallback

import merak
from merak.core.mesh import current_mesh
from merak.engine.segments import run
from tests.multirank.training import Outcome, Setup, Texts, Watch, arguments_of, model_of

SETUP = Setup(
    "gpt2",
    arguments={"max_steps": 9, "save_strategy": "steps", "save_steps": 3, "log_level": "info"},
)
SLEEP_S = 0.02
"""In every forward of a segment on the slow rank; the segments of this model take far less."""

FORWARD = run.forward


class Slow(TrainerCallback):
    """Makes the segments of a rank slow, and counts those that it runs, by step."""

    def __init__(self) -> None:
        self.count = 0
        self.counts: list[int] = []

    def forward(self, *args: Any) -> Any:
        self.count += 1
        time.sleep(SLEEP_S)
        return FORWARD(*args)

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
    lines, slow, outcome = announcements(), Slow(), Outcome()
    chosen = {
        "per_device_train_batch_size": 2, "global_batch": 8, "recompute": "off", "trace_cache": "",
        "cluster": f"a100:{world_size}",
    }  # fmt: skip
    args = merak.MerakArguments(**arguments_of(SETUP, folder) | chosen | given)
    trainer = merak.MerakTrainer(model=model_of(SETUP), args=args, train_dataset=Texts(64))
    trainer.add_callback(Watch(outcome, dict))
    for callback in (slow, *callbacks):
        trainer.add_callback(callback)
    is_slow = current_mesh().rank == world_size - 1
    with mock.patch.object(run, "forward", slow.forward if is_slow else FORWARD):
        trainer.train()
    assert trainer.mesh == current_mesh()
    return lines, outcome.losses, slow.counts, trainer.gather_state_dict()


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
