"""Parts of schedules."""

import pytest

from merak.core.errors import ScheduleError
from merak.schedule.changes import truncate
from merak.schedule.lower import lower
from merak.schedule.registry import build, names
from merak.schedule.validate.schedule import validate
from merak.schedule.validate.steps import check_steps
from tests.tiers import one_in


@pytest.mark.parametrize("name", names())
@one_in(4)
@pytest.mark.parametrize("num_left", [1, 3, 7, 8])
def test_a_part_of_a_valid_schedule_is_valid(name, num_left):
    schedule = build(name, 4, 8)
    part = truncate(schedule, num_left)
    assert part.num_microbatches == num_left
    assert validate(part) == ()
    assert check_steps(part, lower(part)) == ()


@pytest.mark.parametrize("num_left", [0, 9])
def test_a_part_is_not_empty_and_not_more_than_the_whole(num_left):
    with pytest.raises(ScheduleError, match="use 1 to 8"):
        truncate(build("1f1b", 4, 8), num_left)
