"""Where a run on ranks parts from one process: faults are named with their line."""

from __future__ import annotations

import inspect
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from merak.check import Case, CheckOptions, CheckReport, Job, Layout, check_model
from merak.check.check import trace_job
from merak.check.first_divergence import StepPhase, first_divergence, with_equal_microbatches
from merak.check.runs import observe_on_ranks
from merak.zoo.check_by_name import small_version
from merak.zoo.request import Request
from tests.multirank.check_on import launcher
from tests.multirank.ranks import RankPool
from tests.tiers import slow


def is_rank() -> bool:
    return "RANK" in os.environ


class Scaled(torch.autograd.Function):
    """x; its backward gives twice the gradient on ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> torch.Tensor:
        return 2.0 * gradient if is_rank() else 1.0 * gradient


class Faulty(nn.Module):
    """Three blocks; the second one is wrong in some way."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.fault = fault
        self.shift = 0.5 if fault == "forward" and is_rank() else 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        if self.fault == "trace" and torch.compiler.is_exporting():
            x = x * 1.5  # the trace is wrong here
        x = torch.tanh(self.second(x))
        x = x + self.shift  # the forward is wrong here
        if self.fault == "backward":
            x = Scaled.apply(x)  # the backward is wrong here
        return self.third(x * self.norm(x)).square().mean()


def draw(step: int, samples: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(samples, 8, generator=torch.Generator().manual_seed(step))}


def line_of(fault: str) -> int:
    lines, first = inspect.getsourcelines(Faulty)
    return first + next(i for i, line in enumerate(lines) if f"the {fault} is wrong here" in line)


def checked(pool: RankPool, fault: str, layout: Layout) -> CheckReport:
    case = Case("Faulty", partial(Faulty, fault), draw)
    return check_model(case, layout, CheckOptions(steps=1), launch=launcher(pool))


@pytest.mark.parametrize(
    ("fault", "segment", "layout"),
    [
        ("trace", "0 (first)", Layout(pp=2)),
        slow("forward", "1 (second)", Layout(pp=2)),
        ("backward", "1 (second)", Layout(tp=2)),
    ],
)
def test_the_line_of_a_fault(pool: RankPool, fault: str, segment: str, layout: Layout) -> None:
    said = str(checked(pool, fault, layout).reason)
    part = StepPhase[fault.upper()].value
    assert f"they diverge in {part}, in segment {segment} at {__file__}:{line_of(fault)}" in said


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", slow("T5ForConditionalGeneration")])
def test_operators_of_a_model_that_is_right(pool: RankPool, tmp_path: Path, name: str) -> None:
    layout = Layout(tp=2)
    job: Job = with_equal_microbatches(small_version(Request(name), layout, CheckOptions()).job)
    graph = trace_job(job, tmp_path)
    ranks = pool.run(observe_on_ranks, 2, job, tmp_path)
    assert first_divergence(job, graph, ranks).phase is StepPhase.REDUCTION
