from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch

from merak.core.mesh import Mesh, reset
from merak.core.start.init import init
from merak.engine.health import step_records
from merak.engine.health.status import Progress, Wait
from merak.engine.health.step_records import DeviceClock, HostClock, clock_of, gather_records
from merak.schedule.ir import parse_action
from merak.schedule.registry import build
from merak.schedule.simulator.timeline import measured_timeline

SCHEDULE = build("1f1b", 1, 2)
FORWARD, BACKWARD = parse_action("0F0"), parse_action("0B0")


class LateClock:
    """A device that the host runs ahead of: marks are numbers that `passed` reaches one by one."""

    runs_behind = True

    def __init__(self) -> None:
        self.taken = 0
        self.passed = 0

    def mark(self) -> int:
        self.taken += 1
        return self.taken

    def is_past(self, mark: int) -> bool:
        return mark <= self.passed

    def seconds(self, marks: Sequence[int]) -> list[float]:
        self.passed = self.taken
        return [mark / 10 for mark in marks]


def run_step(progress: Progress, number: int) -> None:
    with progress.step(number):
        progress.follow_schedule(SCHEDULE)
        with progress.action(FORWARD):
            with progress.waiting("the activation from", (3,)):
                pass
            progress.inputs_ready()
        with progress.action(BACKWARD):
            pass


@pytest.fixture
def mesh() -> Mesh:
    reset()
    made = init(device="cpu")
    reset()
    return made


def test_the_last_steps_are_kept(mesh: Mesh) -> None:
    progress = Progress(HostClock(), 2)
    for number in range(5):
        run_step(progress, number)
    kept = gather_records(progress.records, mesh)
    assert [step.step for step in kept] == [3, 4]
    assert [action for action, _, _ in kept[1].records[0]] == [FORWARD, BACKWARD]
    (_, first, second), (_, third, fourth) = kept[1].records[0]
    assert kept[0].records[0][-1][2] <= first <= second <= third <= fourth
    assert measured_timeline(kept[1].schedule, kept[1].records).end_s == fourth - first


def test_nothing_is_kept_where_nothing_is_recorded(mesh: Mesh) -> None:
    progress = Progress(HostClock(), 0)
    run_step(progress, 0)
    assert gather_records(progress.records, mesh) == ()


def test_a_step_that_fails_leaves_nothing(mesh: Mesh) -> None:
    progress = Progress(HostClock(), 2)
    with pytest.raises(KeyError), progress.step(0):
        progress.follow_schedule(SCHEDULE)
        with progress.action(FORWARD):
            raise KeyError
    assert not progress.status.is_busy
    run_step(progress, 1)
    assert [step.step for step in gather_records(progress.records, mesh)] == [1]


def test_a_device_is_read_late_and_its_waits_do_not_count(mesh: Mesh) -> None:
    clock = LateClock()
    progress = Progress(clock, 1)
    run_step(progress, 0)
    assert clock.passed == 0
    # Marks: 1 the step begins, 2 the forward begins, 3 it has waited, 4 it starts, 5 it ends;
    # 6 and 7 the backward; 8 the step ends.
    (step,) = gather_records(progress.records, mesh)
    assert step.records[0] == ((FORWARD, 0.4, 0.5), (BACKWARD, 0.6, 0.7))
    assert step.spans == ((0.1, 0.8),)
    assert clock.passed == 8
    (own,) = progress.records.own()
    assert own.busy_s == pytest.approx(0.2) and own.pipeline_s == pytest.approx(0.6)


def test_where_a_device_stands_behind_its_host() -> None:
    clock = LateClock()
    progress = Progress(clock, 1)
    run_step(progress, 7)
    assert not progress.status.is_busy  # the host is done
    status = progress.device_status()
    assert status is not None
    assert (status.phase, status.action) == ("step 7", FORWARD)
    assert status.wait == Wait("the activation from", (3,))
    clock.passed = 4
    status = progress.device_status()
    assert status is not None
    assert (status.action, status.wait) == (FORWARD, None)
    clock.passed = 5
    status = progress.device_status()
    assert status is not None
    assert status.action == BACKWARD
    clock.passed = 7
    assert progress.device_status() is None
    assert not progress.behind


def test_both_threads_of_a_watchdog_may_ask_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = LateClock()
    progress = Progress(clock, 1)
    run_step(progress, 0)
    marks = [mark for _, mark in progress.behind]
    asked: list[int] = []
    meeting = threading.Barrier(2)

    def is_past(mark: int) -> bool:
        asked.append(mark)
        with suppress(threading.BrokenBarrierError):
            meeting.wait(0.5)  # until the other one looks at the same mark, if it may
        return True

    monkeypatch.setattr(clock, "is_past", is_past)
    with ThreadPoolExecutor(2) as threads:
        found = [threads.submit(progress.device_status) for _ in range(2)]
    assert [one.result() for one in found] == [None, None]
    assert len(marks) > 1 and asked == marks


def test_where_a_host_stands() -> None:
    progress = Progress(HostClock(), 1)
    assert not progress.status.is_busy
    with progress.waiting("what batches there are on", (1, 2)):
        assert progress.status.is_busy
        assert progress.status.wait == Wait("what batches there are on", (1, 2))
    with progress.step(3), progress.action(FORWARD):
        before = progress.status
        with progress.waiting("the activation from", (3,)):
            assert progress.status.action == FORWARD
        after = progress.status
        assert after.wait is None
        assert after.since_s > before.since_s  # an action's own work is timed from its last wait
    assert not progress.status.is_busy
    assert not progress.behind


def test_clocks_are_compared_between_hosts_memories(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receive of a GPU's tensor does not keep the host waiting, whose clock is read then."""
    seen: list[str] = []

    def send(tensor: torch.Tensor, *_: object) -> None:
        seen.append(tensor.device.type)

    def receive(tensor: torch.Tensor, *_: object) -> None:
        seen.append(tensor.device.type)
        tensor.fill_(time.perf_counter_ns() - 5 * 10**9)

    monkeypatch.setattr(step_records.dist, "send", send)
    monkeypatch.setattr(step_records.dist, "recv", receive)
    monkeypatch.setattr(Mesh, "group", lambda *_: object())
    mesh = Mesh(1, 1, 2, 1, torch.device("meta"), None)  # nothing can be read there
    assert step_records._offset_s(mesh) == pytest.approx(5, abs=1)
    assert set(seen) == {"cpu"}


@pytest.mark.gpu
def test_a_gpus_events_are_read_on_the_hosts_clock() -> None:
    clock = DeviceClock(torch.device("cuda", 0))
    clock.seconds([clock.mark()])  # the first use of a device takes long
    before = time.perf_counter()
    first = clock.mark()
    torch.cuda._sleep(200_000_000)  # cycles
    second = clock.mark()
    assert not clock.is_past(second)
    left = time.perf_counter()
    start, end = clock.seconds([first, second])
    after = time.perf_counter()
    assert clock.is_past(second)
    assert before - 1e-3 < start < left < end < after + 1e-3
    assert clock_of(torch.device("cuda", 0)).runs_behind
    assert not clock_of(torch.device("cpu")).runs_behind
