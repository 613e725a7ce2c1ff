"""The option `offload_optimizer`: where an optimizer's states are."""

from __future__ import annotations

from pathlib import Path

import pytest

from merak.core.errors import ArgumentsError
from merak.plan.optimizer.home import folder_of, is_away, read_home, shared_out
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


def test_files_leave_some_parts_in_memory() -> None:
    assert shared_out("cpu", [5, 7]) == (12, 0)
    assert shared_out("/local/states", [5, 7]) == (12, 12)
    in_memory, in_files = shared_out("/local/states", [2**28] * 64)
    assert 2**28 < in_memory < in_files == 2**34
