"""Ranks that start out of a process which has imported what they need."""

import os
import signal
import sys
import threading

import pytest
import torch
import torch.distributed as dist

from merak.core.errors import RunError
from merak.launch.forkserver import (
    FROM_IMPORTED,
    FROM_NOTHING,
    PRELOADED,
    num_threads,
    ranks_prepared,
    start_method,
)
from merak.launch.ranks import Work, run_ranks

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or torch.accelerator.is_available(),
    reason="ranks are forked on Linux without an accelerator alone",
)


def describe(expected: str) -> dict[str, object]:
    """What a rank finds as it begins, and whether it can compute and send."""
    found: dict[str, object] = {
        "imported": all(name in sys.modules for name in PRELOADED),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "variable": os.environ.get("OMP_NUM_THREADS") == expected,
    }
    dist.init_process_group("gloo")
    weight = torch.full((3,), 2.0, requires_grad=True)
    weight.square().sum().backward()
    assert weight.grad is not None
    dist.all_reduce(weight.grad)
    dist.destroy_process_group()
    return {**found, "sum": float(weight.grad.sum())}


def end_by_signal() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_ranks_begin_with_what_they_need(capfd: pytest.CaptureFixture[str]) -> None:
    interrupt, threads = signal.getsignal(signal.SIGINT), os.environ.get("OMP_NUM_THREADS")
    with ranks_prepared(2):
        assert (signal.getsignal(signal.SIGINT), os.environ.get("OMP_NUM_THREADS")) == (
            interrupt,
            threads,
        )
        assert start_method() == FROM_IMPORTED
        torch.ones(3, requires_grad=True).sum().backward()  # what nobody may fork after
        found = run_ranks(Work(describe, (threads or num_threads(2),)), 2)
        with pytest.raises(RunError, match="was killed by SIGKILL"):
            run_ranks(Work(end_by_signal, ()), 2)
    assert start_method() == FROM_NOTHING
    assert found == {
        "imported": True, "threads": ["MainThread", "merak signals"], "interrupt": True,
        "variable": True, "sum": 24.0,
    }  # fmt: skip
    assert "Traceback" not in capfd.readouterr().err


def test_a_rank_of_torchrun_starts_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with ranks_prepared(2):
        assert start_method() == FROM_NOTHING
