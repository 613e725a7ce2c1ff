"""Sequence parallelism on real ranks gives what one process gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import merak
from tests.multirank.compare import assert_close
from tests.multirank.ranks import RankPool
from tests.multirank.training import VOCABULARY, Setup, gpt2, make_merak, train_merak
from tests.tiers import slow

SHARED = {"sequence_parallel": True, "max_steps": 3}
SETUPS = [
    Setup("gpt2", dropout=0.1, num_samples=32, arguments={**SHARED, "max_grad_norm": 0.5}),
    Setup("llama", num_samples=32, arguments=SHARED),
    Setup("bert", dropout=0.1, num_samples=32, arguments={**SHARED, "recompute": "full"}),
    Setup("plain", dropout=0.1, num_samples=32, arguments=SHARED),
]


@pytest.mark.parametrize(
    ("layout", "setups"),
    [((1, 2, 1), SETUPS[:1]), slow((1, 2, 1), SETUPS), slow((1, 2, 2), SETUPS)],
)
def test_ranks_equal_one_process(
    pool: RankPool, cache: str, layout: tuple[int, int, int], setups: list[Setup]
) -> None:
    # Merak on one rank, which draws dropout as every layout does.
    (expected,) = pool.run(train_merak, 1, (1, 1, 1), setups, cache)
    dp, tp, pp = layout
    ranks = pool.run(train_merak, dp * tp * pp, layout, setups, cache)
    for i, wanted in enumerate(expected):
        assert_close([rank[i] for rank in ranks], wanted)


def losses_of_lengths(tp: int) -> list[float]:
    """Losses of steps and evaluations of batches whose length, and then number, does not divide."""
    merak.init(tp=tp, device="cpu")
    torch.manual_seed(0)
    draws = torch.Generator().manual_seed(1)
    shapes = ((2, 12), (2, 11), (1, 11), (2, 12))
    ids = [torch.randint(VOCABULARY, shape, generator=draws) for shape in shapes]
    batches = [{"input_ids": i, "labels": i} for i in ids]
    model = merak.parallelize(
        gpt2(0.1),
        batches[0],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        sequence_parallel=tp > 1,
    )
    return [float(run(batch)) for batch in batches for run in (model.step, model.evaluate)]


@pytest.mark.slow
def test_lengths_change_from_step_to_step(pool: RankPool) -> None:
    (expected,) = pool.run(losses_of_lengths, 1, 1)
    for losses in pool.run(losses_of_lengths, 2, 2):
        assert losses == pytest.approx(expected, rel=1e-5)


def resumed(tp: int, steps: int, folder: str, cache: str, resume: str | None) -> list[float]:
    """Losses of a job that saves every second step, from a checkpoint on."""
    merak.init(tp=tp, device="cpu")
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "output_dir": folder}
    # A rate that does not depend on the number of steps, of which the first job has fewer.
    saving |= {"lr_scheduler_type": "constant"}
    setup = Setup(
        "gpt2",
        num_samples=32,
        arguments={"max_steps": steps, "sequence_parallel": tp > 1, **saving},
    )
    trainer = make_merak(setup, 1, cache)
    trainer.train(resume_from_checkpoint=resume)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.slow
def test_a_checkpoint_is_resumed_without_sequence_parallelism(
    pool: RankPool, cache: str, tmp_path: Path
) -> None:
    own, other = str(tmp_path / "own"), str(tmp_path / "other")
    (expected,) = pool.run(resumed, 1, 1, 3, other, cache, None)
    pool.run(resumed, 2, 2, 2, own, cache, None)
    (found,) = pool.run(resumed, 1, 1, 3, own, cache, f"{own}/checkpoint-2")
    assert len(found) == 3
    assert found == pytest.approx(expected, rel=1e-5)
