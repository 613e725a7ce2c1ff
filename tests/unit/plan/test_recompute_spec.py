"""The argument `recompute`, and what the balance of stages counts of it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from merak.core.errors import PlanError
from merak.plan.balance import balance
from merak.plan.recompute_spec import Recompute, recomputing_times


@dataclass(frozen=True)
class Times:
    forward_s: float
    backward_s: float


NAMES = ("embedding", "block", "loss")
TIMES = (Times(3.0, 0.0), Times(1.0, 2.0), Times(2.0, 4.0))


@pytest.mark.parametrize(
    ("value", "backwards"),
    [
        ("off", (0.0, 2.0, 4.0)),
        ("full", (0.0, 3.0, 6.0)),
        (0.5, (0.0, 2.5, 5.0)),
        ("block,2", (0.0, 3.0, 6.0)),
        ([2], (0.0, 2.0, 6.0)),
        ("selective", (0.0, 2.0, 4.0)),
        ("auto", (0.0, 2.0, 4.0)),
        (None, (0.0, 2.0, 4.0)),
    ],
)
def test_backwards_include_the_forwards_that_run_again(
    value: Recompute, backwards: tuple[float, ...]
) -> None:
    """A segment without a backward, such as a frozen one, is not computed again."""
    found = recomputing_times(TIMES, NAMES, value)
    assert tuple(own.backward_s for own in found) == backwards
    assert [own.forward_s for own in found] == [own.forward_s for own in TIMES]


def test_an_unknown_segment_is_refused() -> None:
    with pytest.raises(PlanError, match="names the segment 'head'"):
        recomputing_times(TIMES, NAMES, ["head"])


def test_what_is_nearly_all_backward_weighs_less_where_forwards_run_again() -> None:
    """Ten equal blocks, and a last segment without a forward: 14 s and 14 s, or 18 s and 20 s."""
    times = (*[Times(1.0, 1.0)] * 10, Times(0.0, 8.0))
    names = tuple(map(str, range(11)))
    sizes = [balance(recomputing_times(times, names, own), 2, 64).sizes for own in ("off", "full")]
    assert sizes == [(7, 4), (6, 5)]
