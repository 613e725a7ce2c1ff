"""Ranks that a command starts: the result of rank 0, and the first cause of a failure."""

import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist

from merak.cli.errors import RunError
from merak.cli.launch import Work, run_ranks
from merak.core.errors import MerakError, ShardError, TrainingError


def add_ranks(offset: int) -> int:
    print("not the result")
    dist.init_process_group("gloo")
    total = torch.tensor(offset + dist.get_rank())
    dist.all_reduce(total)
    dist.destroy_process_group()
    return int(total) * 10 + int(os.environ["RANK"])


def fail_on_rank_1(how: str) -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() != 1:
        dist.barrier()  # fails when rank 1 is gone, or waits until this rank is ended
        time.sleep(600)
    if how == "bad input":
        raise ShardError("5 heads cannot be split over tp=2.")
    if how == "training":
        raise TrainingError("step 3 has loss nan.")
    if how == "bug":
        raise RuntimeError("a bug of rank 1")
    if how == "exit":
        sys.exit(7)
    os.kill(os.getpid(), signal.SIGKILL)


def test_result_of_rank_0(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_ranks(Work(add_ranks, (5,)), 2) == 110
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.count("not the result") == 2


@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [
        ("bad input", MerakError, r"^5 heads cannot be split over tp=2\.$"),
        ("training", RunError, r"^step 3 has loss nan\.$"),
        ("bug", RunError, r"^rank 1 failed:\nTraceback[\s\S]*RuntimeError: a bug of rank 1$"),
        ("killed", RunError, r"^rank 1 was ended by SIGKILL"),
        ("exit", RunError, r"^rank 1 failed:\nTraceback[\s\S]*SystemExit: 7$"),
    ],
)
def test_first_cause_once(
    how: str, kind: type[Exception], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(kind, match=said):
        run_ranks(Work(fail_on_rank_1, (how,)), 2)
    captured = capfd.readouterr()
    assert "Traceback" not in captured.out + captured.err
