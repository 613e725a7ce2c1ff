"""`merak.check` with real ranks: models that train alike pass, and one that does not is found."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from merak.check import Case, CheckOptions, CheckReport, Layout, check_model
from merak.cli.main import main
from merak.core.errors import PlanError, ScheduleError
from tests.multirank.check_on import launcher
from tests.multirank.ranks import RankPool
from tests.remote_code import write_remote_model
from tests.tiers import slow


class Net(nn.Module):
    """Blocks of a width; on ranks, those of a pipeline `other` than one process may compute."""

    def __init__(self, other: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.BatchNorm1d(8)
        self.slope = 2.0 if other and "RANK" in os.environ else 1.0

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for index, block in enumerate(self.blocks):
            x = torch.tanh(block(x) * (self.slope if index == 2 else 1.0))
        return {"loss": self.norm(x).square().mean() + x.sum() / 100}


class Rounded(nn.Module):
    """A sigmoid in float32 whatever it is given; on ranks its last bits are others.

    A thousand of them, of whatever type it computes in: rounding that is the same on any machine.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_bits = 1000 if "RANK" in os.environ else 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.sigmoid(x.float())
        return x * (1 + self.num_bits * torch.finfo(x.dtype).eps)


class Branching(Rounded):
    """Cannot be traced inside, and returns the type that it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.abs().max() > 1e6:
            x = x / 2
        return super().forward(x).type_as(x)


class BranchingFloat(Rounded):
    """Cannot be traced inside, and returns float32 whatever it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.abs().max() > 1e6:
            x = x / 2
        return super().forward(x)


class Rounding(nn.Module):
    """Computes in float32 whatever its type, and on ranks rounds otherwise than one process."""

    def __init__(self, squash: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.up, self.down, self.last = nn.Linear(8, 64), nn.Linear(64, 8), nn.Linear(8, 4)
        self.squash = squash()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.squash(self.down(torch.tanh(self.up(x))))).square().mean()


def draw(step: int, samples: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(samples, 8, generator=generator)}


def run(pool: RankPool, layout: Layout, schedule: str = "1f1b", other: bool = False) -> CheckReport:
    return run_case(pool, Case("Net", partial(Net, other), draw), layout, schedule)


def run_case(pool: RankPool, case: Case, layout: Layout, schedule: str = "1f1b") -> CheckReport:
    return check_model(case, layout, CheckOptions(schedule, steps=2), launch=launcher(pool))


@pytest.mark.parametrize("layout", [Layout(tp=2)])
def test_a_model_that_trains_alike(pool: RankPool, layout: Layout) -> None:
    report = run(pool, layout)
    assert (report.ok, report.reason) == (True, None)
    assert (report.tp_sharded_fraction > 0.3) == (layout.tp > 1)
    assert report.loss_max_rel_diff is not None and report.loss_max_rel_diff < 1e-6
    assert report.segments == 4


@pytest.mark.parametrize("squash", [Rounded, slow(Branching), slow(BranchingFloat)])
def test_what_float64_shows_to_be_rounding_is_right(
    pool: RankPool, squash: Callable[[], nn.Module]
) -> None:
    case = Case("Rounding", partial(Rounding, squash), draw)
    report = run_case(pool, case, Layout(dp=2, tp=2))
    assert (report.ok, report.reason) == (True, None)
    assert report.gradient_max_rel_diff is not None and report.gradient_max_rel_diff > 1e-5
    assert report.tolerance >= report.gradient_max_rel_diff


def test_a_model_that_parts_from_one_process(pool: RankPool) -> None:
    report = run(pool, Layout(pp=2), other=True)
    assert not report.ok
    said = str(report.reason)
    assert "the gradient of" in said and f"{__file__}:" in said and "losses are off" in said


def test_degrees_and_schedules_that_do_not_fit(pool: RankPool) -> None:
    with pytest.raises(PlanError, match="4 segments cannot fill 5 stages"):
        run(pool, Layout(pp=5))
    with pytest.raises(ScheduleError, match="There is no schedule '1f2b'"):
        run(pool, Layout(pp=2), "1f2b")


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", "--model", "LlamaForCausalLM", "--tp", "2", "--pp", "2", "--json"]
    assert main(words) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert captured.out.count("\n") == 1
    assert (report["model"], report["ok"], report["reason"]) == ("LlamaForCausalLM", True, None)
    assert 0 < report["parameter_max_rel_diff"] < 1e-5
    assert 0.5 < report["tp_sharded_fraction"] < 1
    assert report["segments"] == 6


@pytest.mark.slow
def test_a_model_that_computes_no_loss(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--model", "GPT2Model", "--pp", "2", "--steps", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["columns"], report["loss"]) == (
        True,
        ["input_ids"],
        "outputs_loss",
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "GPT2LMHeadModel", "--tp", "5"], "tp=5 can split nothing of this model"),
        (["--model", "GPT2LMHeadModel", "--pp", "0"], "--pp 0 is too few"),
        (["--model", "GPT2LMHeadModel", "--schedule", "1f2b"], "There is no schedule '1f2b'"),
        (["--model", "GPT2LMHeadMode"], "did you mean GPT2LMHeadModel"),
        (["--model", "GPT2LMHeadModel", "--seq", "0"], "--seq 0 has no tokens; use 1 or more."),
        (["--model", "GPT2LMHeadModel", "--device", "tpu"], "tpu is not supported; use cpu or"),
        (["--model", "GPT2LMHeadModel", "--backend", "mpi"], "mpi is not supported; use gloo or"),
        (
            ["--model", "GPT2LMHeadModel", "--backend", "nccl", "--device", "cpu"],
            "nccl carries tensors of GPUs alone; use gloo",
        ),
        (["--model", "some/model-8b"], "neither the hub nor its cache on this machine has it"),
        (["--model", ""], "give a class such as LlamaForCausalLM"),
        (["--model", "."], ". has no config.json; give a folder that save_pretrained wrote"),
        (["--model", "GPT2LMHeadModel", "--config", '{"n_embd": 30}'], "n_embd|embed_dim"),
    ],
)
def test_bad_input(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert any(part in captured.err.splitlines()[-1] for part in said.split("|"))


@pytest.mark.slow
def test_code_of_a_folder_runs_only_if_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    write_remote_model(tmp_path)
    words = ["check", "--model", str(tmp_path), "--steps", "1", "--json"]
    assert main(words) == 2
    assert "add --trust-remote-code" in capsys.readouterr().err
    assert main([*words, "--trust-remote-code"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
