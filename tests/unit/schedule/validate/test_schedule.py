"""Every rule of the validator, by a schedule that breaks it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from merak.core.errors import ScheduleError
from merak.schedule.ir import Schedule
from merak.schedule.registry import build
from merak.schedule.serialize import from_text
from merak.schedule.validate.schedule import check, check_in_flight, validate
from tests.unit.schedule.grid import every_schedule


def test_every_schedule_is_valid() -> None:
    wrong = {
        (schedule.name, schedule.num_ranks, schedule.num_microbatches): problems
        for schedule in every_schedule((1, 2, 3, 4, 6, 8), (1, 2, 3, 4, 5, 8, 12, 16))
        if (problems := validate(schedule))
    }
    assert not wrong


def two_ranks(rank_0: str, rank_1: str, **fields: Any) -> Schedule:
    """A schedule of two stages and two microbatches."""
    text = f"name: mine\nmicrobatches: 2\nrank 0: {rank_0}\nrank 1: {rank_1}"
    return replace(from_text(text), **fields)


GOOD = ("F0 F1 B0 B1", "F0 B0 F1 B1")


@pytest.mark.parametrize(
    ("lists", "fields", "sentence"),
    [
        (GOOD, {"pipes": ((0, 2),)}, "pipe 0 puts stage 1 on rank 2; ranks are 0 to 1."),
        (GOOD, {"pipes": ((0,),)}, "pipe 0 places 1 stages; the model has 2."),
        (GOOD, {"pipes": ((0, 0),)}, "rank 1 holds no stage; give it one or leave it out."),
        (GOOD, {"microbatch_pipes": (0, 1)}, "microbatch 1 goes through pipe 1, which does not"),
        (GOOD, {"pipes": ()}, "it needs at least one pipe, one rank and one microbatch."),
        (GOOD, {"eager_reduction": (True,)}, "eager_reduction has 1 values; the model has 2"),
        (GOOD, {"weight_versions": ((0, 0),)}, "weight_versions has 1 rows; the model has 2"),
        (GOOD, {"weight_versions": ((0, 0), (0,))}, "of stage 1 has 1 values; there are 2"),
        (GOOD, {"microbatches_per_update": 3}, "it updates every 3 microbatches; use 1 to 2."),
        (GOOD, {"microbatches_per_update": 1}, "it updates every 1 of 2 microbatches and does"),
        (("F0 F1 B0 B2", GOOD[1]), {}, "B2 at position 3 of rank 0 is of a microbatch that does"),
        (("F0 F1 B0 1B1", GOOD[1]), {}, "B1 at position 3 of rank 0 belongs on rank 1"),
        (("F0 F1 B0 5B1", GOOD[1]), {}, "B1 at position 3 of rank 0 is on a stage that does not"),
        (("F0 F1 F1 B0 B1", GOOD[1]), {}, "F1 at position 1 of rank 0 is one of 2; keep one."),
        (("F0 B0 B1", GOOD[1]), {}, "microbatch 1 on stage 0 has no forward; add it to rank 0."),
        (("F0 F1 B0", GOOD[1]), {}, "microbatch 1 on stage 0 has no complete backward; give rank"),
        (("F0 F1 B0 I1", GOOD[1]), {}, "microbatch 1 on stage 0 has no complete backward"),
        (("F0 F1 B0 B1 W1", GOOD[1]), {}, "microbatch 1 on stage 0 has a B beside an I or W"),
        (("F0 F1 R0 B0 B1", GOOD[1]), {}, "microbatch 0 on stage 0 has an R on rank 0, but"),
        (("F0 F1 W0 I0 B1", GOOD[1]), {}, "I0 at position 3 of rank 0 comes after W0; put it"),
        (("B0 F0 F1 B1", GOOD[1]), {}, "B0 at position 0 of rank 0 comes before its forward"),
        (
            ("F0 F1 B0 R0 B1", GOOD[1]),
            {"recompute": (True, False)},
            "R0 at position 3 of rank 0 comes after B0; put it before.",
        ),
        (
            ("F0 B0 F1 B1", "F0 F1 B0 B1"),
            {},
            "rank 0 at position 1 (0B0) waits for 1B0 of 1; rank 1 at position 1 (1F1) waits for "
            "0F1 of 0. Reorder these actions.",
        ),
    ],
)
def test_problems_point_at_rank_action_and_position(
    lists: tuple[str, str], fields: dict[str, Any], sentence: str
) -> None:
    schedule = two_ranks(*lists, **fields)
    assert any(sentence in problem for problem in validate(schedule)), validate(schedule)
    with pytest.raises(ScheduleError, match="The schedule mine is invalid: "):
        check(schedule)


ASYNCHRONOUS = {"microbatches_per_update": 1, "weight_versions": ((0, 0), (0, 1))}


@pytest.mark.parametrize(
    ("lists", "fields", "sentence"),
    [
        (GOOD, {"weight_versions": ((0, 1), (0, 1))}, "F1 at position 1 of rank 0 uses weight"),
        (GOOD, {"weight_versions": ((0, 0), (0, -1))}, "uses weight version -1; 1 updates are"),
        (GOOD, {"eager_reduction": (False, True)}, "stage 0 is not reduced eagerly"),
        (
            ("F0 F1 B0 B1", "F0 F1 B1 B0"),
            {"weight_versions": ((0, 0), (0, 0))},
            "B0 at position 3 of rank 1 is of update 0 and comes after one of update 1",
        ),
    ],
)
def test_problems_of_asynchronous_schedules(
    lists: tuple[str, str], fields: dict[str, Any], sentence: str
) -> None:
    assert not validate(two_ranks(*GOOD, **ASYNCHRONOUS))
    schedule = two_ranks(*lists, **{**ASYNCHRONOUS, **fields})
    assert any(sentence in problem for problem in validate(schedule)), validate(schedule)


def test_weight_versions_do_not_get_older() -> None:
    schedule = replace(build("pipedream", 1, 3), weight_versions=((0, 1, 0),))
    (problem,) = validate(schedule)
    assert problem == "F2 at position 4 of rank 0 uses weight version 0 after version 1."


def test_asynchronous_stages_have_no_replicas() -> None:
    schedule = replace(
        build("chimera", 2, 2), microbatches_per_update=1, weight_versions=((0, 0), (0, 0))
    )
    assert validate(schedule)[0] == (
        "stage 0 is asynchronous and lives on ranks 0, 1; put it on one."
    )


@given(st.data())
def test_no_single_deletion_or_repetition_goes_unnoticed(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["1f1b", "chimera", "zero_bubble_v", "pipedream"]))
    schedule = build(name, 4, 8)
    rank = data.draw(st.integers(0, 3))
    place = data.draw(st.integers(0, len(schedule.actions[rank]) - 1))
    own = schedule.actions[rank]
    repeated = data.draw(st.booleans())
    own = own[:place] + (own[place],) * (2 if repeated else 0) + own[place + 1 :]
    lists = (*schedule.actions[:rank], own, *schedule.actions[rank + 1 :])
    assert validate(replace(schedule, actions=lists))


def test_an_in_flight_limit_names_the_action_and_the_least_that_fits() -> None:
    check_in_flight(build("1f1b", 4, 8), 4)
    sentence = (
        "1f1b does not fit the limit of 2 microbatches in flight: F2 at position 2 of rank 0 "
        "brings its rank to 3. The least limit it fits is 4."
    )
    with pytest.raises(ScheduleError, match=re.escape(sentence)):
        check_in_flight(build("1f1b", 4, 8), 2)
