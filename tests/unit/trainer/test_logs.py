"""Tokens per second and memory, as training logs them."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from merak.engine.health.figures import Interval, memory_bytes
from merak.trainer import logs
from merak.trainer.logs import Throughput, announced_level
from merak.trainer.tokens import TokenCounter


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(logs.time, "perf_counter", lambda: now[0])
    return now


def test_tokens_since_the_last_log(clock: list[float]) -> None:
    counted = Throughput(counts_tokens=True)
    for _ in range(3):
        counted.add(200, 4)
    clock[0] = 104.0
    assert counted.take() == Interval(seconds=4.0, steps=3, microbatches=12, tokens=600)
    counted.add(100, 2)
    clock[0] = 105.0
    assert counted.take() == Interval(1.0, 1, 2, 100)
    assert counted.take() == Interval(0.0, 0, 0, 0)


def test_evaluations_and_checkpoints_are_left_out(clock: list[float]) -> None:
    counted = Throughput(counts_tokens=True)
    counted.add(100, 2)
    clock[0] = 102.0  # two seconds of training
    clock[0] = 110.0
    counted.leave_out(102.0)
    counted.add(100, 2)
    clock[0] = 112.0
    assert counted.take() == Interval(4.0, 2, 4, 200)
    counted.add(100, 2)
    clock[0] = 130.0  # the same call went on to evaluate after the log
    counted.leave_out(111.0)
    clock[0] = 132.0
    assert counted.take() == Interval(2.0, 1, 2, 100)


def test_pixels_are_no_tokens(clock: list[float]) -> None:
    counted = Throughput(counts_tokens=False)
    counted.add(100, 2)
    clock[0] = 104.0
    assert counted.take() == Interval(4.0, 1, 2, 0)


def test_what_tokens_are() -> None:
    counter = TokenCounter(None, "x", None)
    assert counter.counts_tokens({"x": torch.zeros(2, 3, dtype=torch.int64)})
    assert not counter.counts_tokens({"x": torch.zeros(2, 3)})
    assert not counter.counts_tokens({"y": torch.zeros(2, 3, dtype=torch.int64)})


def test_memory_of_the_cpu_is_what_is_resident() -> None:
    name, first = memory_bytes(torch.device("cpu"))
    assert name == "memory_gb"
    assert first is None or first > 10_000_000
    kept = torch.ones(64 * 2**20, dtype=torch.uint8)
    second = memory_bytes(torch.device("cpu"))[1]
    assert second is None or second > 0
    del kept


@pytest.mark.parametrize(
    ("given", "expected"),
    [("passive", logging.INFO), ("info", logging.INFO), ("error", logging.ERROR)],
)
def test_the_level_of_announcements(given: str, expected: int) -> None:
    assert announced_level(cast(Any, SimpleNamespace(log_level=given))) == expected
