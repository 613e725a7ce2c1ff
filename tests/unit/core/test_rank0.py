"""Decisions and warnings of rank 0, on one process that pretends to be each rank."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import pytest
import torch.distributed as dist

from merak.core import rank0
from merak.core.errors import PlanError
from merak.core.rank0 import Rank0Error, decide_on_rank0, warn_on_rank0, warn_once

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Grid:
    rank: int = 0
    device_mesh: Any = "a mesh"


class TooLong(PlanError):
    """An error whose class takes other arguments than a message."""

    def __init__(self, size: int) -> None:
        super().__init__(f"{size} is too long.")


def broadcast(monkeypatch: pytest.MonkeyPatch) -> None:
    """What rank 0 broadcasts is what the others receive."""
    sent: list[Any] = []

    def between(objects: list[Any], src: int) -> None:
        assert src == 0
        if sent:
            objects[:] = sent
        sent[:] = objects

    monkeypatch.setattr(dist, "broadcast_object_list", between)


def test_a_single_process_decides() -> None:
    assert decide_on_rank0(Grid(device_mesh=None), "the partition", lambda: 3) == 3


def test_every_rank_has_the_decision_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    broadcast(monkeypatch)
    assert decide_on_rank0(Grid(), "the partition", lambda: None) is None
    broadcast(monkeypatch)
    assert decide_on_rank0(Grid(), "the partition", lambda: (1, 2)) == (1, 2)
    assert decide_on_rank0(Grid(rank=1), "the partition", lambda: (3, 4)) == (1, 2)


def test_every_rank_refuses_with_the_sentence_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    def decide() -> int:
        raise TooLong(7)

    broadcast(monkeypatch)
    with pytest.raises(TooLong, match="7 is too long"):
        decide_on_rank0(Grid(), "the partition", decide)
    with pytest.raises(PlanError, match="7 is too long") as caught:
        decide_on_rank0(Grid(rank=1), "the partition", decide)
    assert type(caught.value) is PlanError


def test_any_other_error_of_rank_0_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def decide() -> int:
        return {}["a key"]

    broadcast(monkeypatch)
    with pytest.raises(KeyError, match="a key"):
        decide_on_rank0(Grid(), "the partition", decide)
    with pytest.raises(
        Rank0Error, match=r"rank 0 could not decide the partition: KeyError\('a key'\)"
    ) as caught:
        decide_on_rank0(Grid(rank=1), "the partition", decide)
    assert "in decide" in caught.value.__notes__[0]


def test_rank_0_alone_warns(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    warn_on_rank0(logger, "of %s", "rank 1")
    monkeypatch.setenv("RANK", "0")
    warn_on_rank0(logger, "of %s", "rank 0")
    assert [r.getMessage() for r in caplog.records] == ["of rank 0"]
    assert caplog.records[0].filename == "test_rank0.py"


def test_a_warning_is_given_once(caplog: pytest.LogCaptureFixture) -> None:
    rank0.warn_once.cache_clear()
    for folder in ("a", "a", "b"):
        warn_once(logger, "no folder %s", folder)
    assert [r.getMessage() for r in caplog.records] == ["no folder a", "no folder b"]
    assert caplog.records[0].filename == "test_rank0.py"
