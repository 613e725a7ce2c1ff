"""How far one stage's backwards run ahead of another's."""

import pytest

from merak.schedule.lead import max_lead
from merak.schedule.registry import build, names

SYNCHRONOUS = [name for name in names() if build(name, 4, 8).is_synchronous]


def test_the_last_stage_is_ahead_by_those_that_are_on_their_way():
    # 1F1B with F = 1, B = 2: the last stage starts a backward every 3, and each takes 2 (P - 1) to
    # get to the first; so those that start within that time are ahead.
    schedule = build("1f1b", 4, 16, recompute=False)
    assert max_lead(schedule, 3, 0) == 2
    assert max_lead(schedule, 3, 2) == 1
    assert max_lead(build("1f1b", 8, 32, recompute=False), 7, 0) == 5
    # An earlier stage goes backward later.
    assert max_lead(schedule, 0, 3) == 0
    # However many microbatches there are.
    assert max_lead(build("1f1b", 4, 64, recompute=False), 3, 0) == 2


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_nobody_is_ahead_by_more_than_there_are(name):
    schedule = build(name, 4, 8)
    last = schedule.num_stages - 1
    for pipe in range(len(schedule.pipes)):
        own = schedule.microbatch_pipes.count(pipe)
        assert 1 <= max_lead(schedule, last, 0, pipe) <= own
