"""What users say about activations in host memory, and which segments a share of them is."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from merak.core.errors import PlanError
from merak.plan.activations.offload import NOTHING, listed, offload_fraction, parse_offload
from merak.plan.partition import from_sizes
from merak.plan.recompute_spec import Mode, RecomputeSpec


@dataclass(frozen=True)
class Time:
    forward_s: float
    backward_s: float


@pytest.mark.parametrize(
    ("value", "spec"),
    [
        (None, NOTHING),
        ("off", NOTHING),
        ("full", RecomputeSpec(Mode.FRACTION, fraction=1.0)),
        ("auto", RecomputeSpec(Mode.AUTO)),
        (0.25, RecomputeSpec(Mode.FRACTION, fraction=0.25)),
        ("3,head", RecomputeSpec(Mode.SEGMENTS, segments=(3, "head"))),
        ([3, "head"], RecomputeSpec(Mode.SEGMENTS, segments=(3, "head"))),
    ],
)
def test_reads_what_users_say(value, spec):
    assert parse_offload(value) == spec


@pytest.mark.parametrize("value", ["selective", "some", "1.5", -0.1, [True]])
def test_refuses_what_is_no_choice(value):
    with pytest.raises(PlanError, match=r"offload_activations=.* is no choice of activations"):
        parse_offload(value)


def test_a_listed_segment_must_exist_and_keep_its_activations():
    names = ["embed", "block", "head"]
    assert listed(
        RecomputeSpec(Mode.SEGMENTS, segments=("block", 2)), names, frozenset({1, 2})
    ) == {1, 2}
    with pytest.raises(PlanError, match="offload_activations names the segment 9, but the model's"):
        listed(RecomputeSpec(Mode.SEGMENTS, segments=(9,)), names, frozenset({1}))
    with pytest.raises(PlanError, match=r"names segment 0 \(embed\), which recomputes"):
        listed(RecomputeSpec(Mode.SEGMENTS, segments=(0,)), names, frozenset({1}))


def test_a_share_takes_what_computes_longest_for_its_bytes():
    times = [Time(1, 2), Time(3, 6), Time(2, 4), Time(1, 2), Time(5, 10), Time(1, 2)]
    moved = {0: 1, 1: 6, 2: 2, 3: 1, 4: 1, 5: 0}
    partition = from_sizes((3, 3), 6)
    every = frozenset(range(6))
    assert offload_fraction(partition, every, times, moved, 1 / 3) == {0, 4}
    assert offload_fraction(partition, every, times, moved, 0.5) == {0, 2, 3, 4}
    assert offload_fraction(partition, every - {0, 5}, times, moved, 0.5) == {2, 4}
    assert offload_fraction(partition, frozenset(), times, moved, 1.0) == frozenset()
