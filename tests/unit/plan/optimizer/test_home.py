"""The option `offload_optimizer`: where an optimizer's states are."""

from __future__ import annotations

from pathlib import Path

import pytest

from merak.core.errors import ArgumentsError
from merak.plan.memory.host import HostBytes, HostMemory, OffloadedTensor, host_bytes
from merak.plan.memory.ledger import Ledger
from merak.plan.optimizer import home
from merak.plan.optimizer.home import folder_of, in_parts, is_away, read_home, shared_out
from merak.plan.options import ParallelOptions


def test_what_each_value_says(tmp_path: Path) -> None:
    assert [is_away(own) for own in (None, "off", "cpu", "./states")] == [False, False, True, True]
    assert ParallelOptions(offload_optimizer=tmp_path).offload_optimizer == str(tmp_path)  # type: ignore[arg-type]
    assert [folder_of(own) for own in (None, "off", "cpu", "./here")] == [
        None,
        None,
        None,
        "./here",
    ]


@pytest.mark.parametrize("given", ["gpu", "nvme"])
def test_other_words_are_refused(given: object) -> None:
    with pytest.raises(ArgumentsError, match=r"is no place for an optimizer's states; use 'cpu'"):
        read_home(given)


def test_parts_have_so_many_bytes_or_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home, "PART_BYTES", 10)
    assert in_parts([4, 6, 20, 3, 3]) == [range(2), range(2, 3), range(3, 5)]
    assert in_parts([]) == []


def test_pinned_buffers_take_more_than_what_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes the next power of two; three parts at a time are on their way to the device."""
    monkeypatch.setattr(home, "PART_BYTES", 1)
    own = [OffloadedTensor(state=12 * n, gradient=4 * n, sent=2 * n) for n in (8, 8, 3, 8, 3)]
    there = HostMemory(Ledger(str))
    plain = HostBytes(0, 12 * 30, 4 * 30)
    assert host_bytes("cpu", own, there, is_pinned=False) == (plain, 0)
    found, _ = host_bytes("cpu", own, there, is_pinned=True)
    rounding = 2 * (16 - 12)
    assert found.total - plain.total == found.pinned == rounding + (2 * 16 + 2 * 8)
    assert host_bytes(None, [], there, is_pinned=True) == (HostBytes(), 0)


def test_delayed_steps_hold_two_gradients_and_two_copies_of_what_is_sent() -> None:
    own = [OffloadedTensor(state=96, gradient=32, sent=12, is_late=True)]
    there = HostMemory(Ledger(str))
    plain = HostBytes(0, optimizer=96 + 2 * 12, gradients=2 * 32)
    assert host_bytes("cpu", own, there, is_pinned=False) == (plain, 0)
    found, _ = host_bytes("cpu", own, there, is_pinned=True)
    assert found.pinned == 2 * (16 - 12)  # nothing else is on its way to the device
    assert host_bytes("/local/states", own, there, is_pinned=False)[1] == plain.total


def test_files_leave_some_parts_in_memory() -> None:
    assert shared_out("cpu", [5, 7]) == (12, 0)
    assert shared_out("/local/states", [5, 7]) == (12, 12)
    in_memory, in_files = shared_out("/local/states", [2**28] * 64)
    assert 2**28 < in_memory < in_files == 2**34
