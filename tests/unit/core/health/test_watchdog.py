"""When a watchdog ends a job, has patience, or only says that it waits; without ranks."""

from __future__ import annotations

import contextlib
import io
import time
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from merak.core.health import status, store, watchdog
from merak.core.health.heartbeat import PREFIX, Heartbeat, own_heartbeat
from merak.core.health.status import Report
from merak.core.health.watchdog import Limit, Member, Watchdog

LIMIT = Limit("hang_limit_s", 100.0)


def waits(for_s: float) -> Report:
    said = f"has waited {for_s:.1f} s for the gradient from rank 1"
    return Report(f"stands in step 3 and {said}", said, for_s, True, False)


WORKS = Report("is tracing the model for 9.0 s and waits for nobody", "", 9.0, False, True)
OUTSIDE = Report("is outside the engine's steps", "", 900.0, False, False)


def watching(found: Report, rank: int = 0, **other: Any) -> tuple[Watchdog, dist.HashStore]:
    """A watchdog of one of two ranks, which has read a heartbeat of the other."""
    store = dist.HashStore()
    found_dog = Watchdog(Member(rank, 2, "pp 0, dp 0, tp 0"), LIMIT)
    found_dog._report = found
    replace(own_heartbeat(), **other).write(store, 1 - rank)
    found_dog._peers.read(store)
    found_dog._last_read = time.perf_counter()
    return found_dog, store


def silence(dog: Watchdog, rank: int, for_s: float) -> None:
    beat, since = dog._peers._found[rank]
    dog._peers._found[rank] = (beat, since - for_s)


@pytest.mark.parametrize(
    "found,other,is_overdue",
    [
        (waits(99.0), {}, False),
        (waits(101.0), {}, True),
        (waits(101.0), {"busy_s": 5.0}, False),
        (waits(500.0), {"busy_s": 290.0}, False),
        (waits(500.0), {"busy_s": 310.0}, True),
        (waits(101.0), {"busy_s": 5.0, "has_left": True}, True),
        (OUTSIDE, {}, False),
        (WORKS, {}, False),
    ],
)
def test_how_long_others_are_waited_for(
    found: Report, other: dict[str, Any], is_overdue: bool
) -> None:
    dog, _ = watching(found, **other)
    assert dog._is_overdue() is is_overdue


def test_after_a_phase_patience_begins_anew() -> None:
    dog, store = watching(waits(200.0), busy_s=100.0)
    assert not dog._is_overdue()
    Heartbeat(**{**own_beat(), "count": 1}).write(store, 1)
    dog._peers.read(store)  # it has gone on, and what it owes may be on its way
    assert not dog._is_overdue()
    dog._excused_at -= 101.0
    assert dog._is_overdue()


def own_beat() -> dict[str, Any]:
    beat = own_heartbeat()
    return {name: getattr(beat, name) for name in beat.__dataclass_fields__}


@pytest.mark.parametrize(
    "found,silent_s,is_overdue",
    [
        (WORKS, 90.0, False),
        (WORKS, 120.0, True),
        (OUTSIDE, 120.0, False),
        (waits(50.0), 120.0, False),
    ],
)
def test_a_rank_that_is_silent_while_this_one_works(
    found: Report, silent_s: float, is_overdue: bool
) -> None:
    dog, _ = watching(found)
    silence(dog, 1, silent_s)
    assert dog._is_overdue() is is_overdue


def test_a_rank_that_has_left_is_not_silent() -> None:
    dog, _ = watching(WORKS, has_left=True)
    silence(dog, 1, 900.0)
    assert not dog._is_overdue()


def test_a_silent_rank_is_no_reason_for_patience() -> None:
    dog, _ = watching(waits(101.0), busy_s=5.0)
    silence(dog, 1, 101.0)
    assert dog._is_overdue()


def test_what_was_read_long_ago_says_nothing_of_silence() -> None:
    dog, _ = watching(WORKS)
    silence(dog, 1, 900.0)
    dog._last_read -= 60.0
    assert not dog._is_overdue()


def test_one_of_the_ranks_that_wait_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1e9)
    doing = {"doing": "is saving the model for 70.0 s", "busy_s": 70.0, "waits_for_nobody": True}
    dog, store = watching(waits(61.0), **doing)
    other, _ = watching(waits(61.0), rank=1, waits_for_nobody=False)
    dog._beat.write(store, 0)
    for _ in range(2):
        dog._log_notice(store)
        other._log_notice(store)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("merak: rank 0 (pp 0, dp 0, tp 0, ")
    assert "has waited 61.0 s for the gradient from rank 1" in line
    assert "; at hang_limit_s=100 the job ends. Meanwhile rank 1 is saving the model for" in line


def test_what_a_watchdog_says_is_seen_while_a_trace_keeps_errors_back(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with contextlib.redirect_stderr(io.StringIO()):
        watchdog._print("merak: rank 0 waits")
    assert capfd.readouterr().err == "merak: rank 0 waits\n"


def test_a_wait_of_seconds_is_not_worth_a_notice(capfd: pytest.CaptureFixture[str]) -> None:
    dog, store = watching(waits(59.0))
    dog._log_notice(store)
    dog._report = OUTSIDE
    dog._log_notice(store)
    assert capfd.readouterr().err == ""


def test_a_rank_says_what_it_is_and_does() -> None:
    dog, store = watching(OUTSIDE)
    with status.phase("loading weights"):
        dog._publish_heartbeat(store)
    assert b'"doing": "is loading weights for 0.0 s and waits for nobody"' in store.get(
        f"{PREFIX}/0"
    )
    assert dog._beat.busy_s is not None
    with status.phase("loading weights"), status.waiting("the plan from", (1,)):
        dog._publish_heartbeat(store)
    assert "is loading weights and has waited" in dog._beat.doing
    assert dog._beat.busy_s is None
    assert status.status().phase == ""


def test_parts_of_a_rank_report_before_it() -> None:
    dog, _ = watching(OUTSIDE)
    dog.add(lambda: WORKS)
    nothing = lambda: None  # noqa: E731
    dog.add(nothing)
    assert dog._current() is WORKS
    dog.remove(nothing)
    dog.remove(nothing)
    assert dog._current() is WORKS


def test_threads_may_end_after_a_store_that_is_gone_has_failed() -> None:
    """Python aborts where a thread comes back from torch's code after the last of its own."""
    dog, _ = watching(OUTSIDE)
    thread = mock.Mock()
    dog._threads = [thread]
    dog.join()
    (seconds,) = thread.join.call_args.args
    assert seconds >= 2 * store.ANSWER_S  # a connection, and a question
    assert dog._is_stopped
