"""A job trains as its plan file says, and refuses a plan for another model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import merak
from merak.plan.price.candidate import Candidate
from merak.plan.search.plan_file import plan_of, write_plan
from tests.multirank.ranks import RankError
from tests.multirank.training import Texts, gpt2
from tests.unit.plan.search.doubles import Double, workload_of

CANDIDATE = Candidate(
    pp=2, microbatch=2, num_microbatches=4, schedule="zero_bubble_h1", partition=(2, 4)
)


def train(path: str, folder: str) -> tuple[int, str, tuple[int, ...]]:
    merak.init(plan=path, device="cpu")
    torch.manual_seed(0)
    args = merak.MerakArguments(
        output_dir=folder, plan=path, max_steps=1, save_strategy="no", trace_cache=""
    )
    trainer = merak.MerakTrainer(model=gpt2(), args=args, train_dataset=Texts(16))
    steps = trainer.train().global_step
    assert trainer.engine is not None
    return steps, args.schedule, tuple(args.partition or ())


@pytest.mark.parametrize("is_other", [False, True])
def test_a_job_follows_its_plan(pool, tmp_path: Path, is_other: bool) -> None:
    path = tmp_path / "plan.json"
    model: nn.Module = nn.Linear(2, 2) if is_other else gpt2()
    write_plan(path, plan_of(workload_of(model), Double().price(CANDIDATE)))
    if is_other:
        with pytest.raises(RankError, match="is for another model: "):
            pool.run(train, 2, str(path), str(tmp_path / "out"))
        return
    expected = (1, "zero_bubble_h1", (2, 4))
    assert pool.run(train, 2, str(path), str(tmp_path / "out")) == [expected] * 2
