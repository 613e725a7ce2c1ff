"""What a user sees of a torchrun job that fails: the first cause, once, and soon."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.tiers import slow

SCRIPT = Path(__file__).with_name("bad_jobs.py")
PATIENCE_S = 300.0
"""Seconds after which a job is taken to hang: half of what ranks wait for a peer that is gone."""


@dataclass(frozen=True)
class Ended:
    """How a job ended.

    Args:
        code: its exit code.
        said: what its ranks said, without the launcher's report of their end.
        report: that report.
    """

    code: int
    said: str
    report: str


def run(case: str, folder: Path, num_ranks: int = 2) -> Ended:
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}", "--standalone"]
    command = [sys.executable, *(launcher if num_ranks > 1 else ()), str(SCRIPT), case, str(folder)]
    environment = {name: v for name, v in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    source = Path(__file__).parents[2] / "src"
    environment |= {"PYTHONPATH": str(source), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    launched = r"^[WEI]\d{4} [\d:.]+ \d+ .*torch/distributed"
    lines = [line for line in done.stderr.splitlines() if not re.match(launched, line)]
    told = "\n".join(lines)
    said, _, report = told.partition('Traceback (most recent call last):\n  File "<frozen runpy>')
    return Ended(done.returncode, said, report)


@pytest.mark.parametrize(
    "case,sentence",
    [
        ("degrees", "dp=2 × tp=1 × pp=2 = 4 ranks, but torchrun started 2; make the product"),
        slow("missing", "merak.init has not been called; call merak.init(dp=…, tp=…, pp=…)"),
        slow("twice", "is a second call, but merak.init(pp=2, device='cpu') has laid the ranks"),
        slow("not_a_number", "or leave such steps out with nan_policy='skip'."),
    ],
)
def test_bad_input_gets_one_sentence(case: str, sentence: str, tmp_path: Path) -> None:
    ended = run(case, tmp_path)
    assert ended.code != 0
    told = re.findall(r"^(?:\[rank\d\]: )?merak: .*", ended.said, flags=re.MULTILINE)
    assert len(told) == 1, ended.said
    assert sentence in told[0]
    assert re.search(r"\[.*bad_jobs\.py:\d+\]$", told[0])
    assert "Traceback" not in ended.said
    assert sentence not in ended.report
    assert not list(tmp_path.glob("output/checkpoint-*"))


@pytest.mark.parametrize(
    "case,reason",
    [
        slow("collator", "OSError: this rank has a reason"),
        slow("callback", "OSError: this rank has a reason"),
    ],
)
def test_the_first_rank_that_raises_is_shown(case: str, reason: str, tmp_path: Path) -> None:
    ended = run(case, tmp_path)
    assert ended.code != 0
    assert ended.said.count(reason) == 1, ended.said
    assert ended.said.count("Traceback") == 1
    assert ended.report.count("told in its own output") == 1
    assert not list(tmp_path.glob("output/checkpoint-*"))


@pytest.mark.slow
def test_a_model_saved_on_one_rank_alone_is_said(tmp_path: Path) -> None:
    ended = run("saves_alone", tmp_path)
    assert ended.code != 0
    assert "rank 0 has called trainer.save_model, but rank 1 ended without" in ended.said
    assert "Traceback" not in ended.said


@pytest.mark.slow
def test_a_model_saved_on_one_rank_alone_is_read_from_disk(tmp_path: Path) -> None:
    ended = run("saves_alone_from_disk", tmp_path)
    assert ended.code == 0, ended.said
    assert (tmp_path / "output" / "model.safetensors").is_file()


def test_a_killed_rank_ends_the_others(tmp_path: Path) -> None:
    ended = run("killed", tmp_path)
    assert ended.code != 0
    assert "Traceback" not in ended.said
    root_cause = ended.report.partition("Root Cause")[2]
    assert "rank      : 1" in root_cause
    assert "SIGKILL" in root_cause


@pytest.mark.slow
def test_a_rank_that_leaves_ends_the_others(tmp_path: Path) -> None:
    ended = run("leaves", tmp_path)
    assert ended.code != 0
    pattern = r"merak: rank 1 \(process \d+ on .+\) has left the job, since its script has ended"
    assert len(re.findall(pattern, ended.said)) == 1, ended.said
    assert "Traceback" not in ended.said


def test_several_degrees_outside_torchrun(tmp_path: Path) -> None:
    ended = run("degrees", tmp_path, num_ranks=1)
    assert ended.code == 2
    assert ended.said.startswith(
        "merak: dp=2 × tp=1 × pp=2 needs 4 ranks, but this is a single process; start it with "
        "`torchrun --nproc-per-node 4 script.py`."
    )
    assert len(ended.said.strip().splitlines()) == 1
