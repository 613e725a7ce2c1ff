"""Lead of one stage's backwards over another's, in microbatches."""

from __future__ import annotations

import numpy as np

from merak.schedule.action_table import tabulate
from merak.schedule.ir import GRADIENT_KINDS, Schedule
from merak.schedule.lower import total_order


def max_lead(schedule: Schedule, stage: int, behind: int, pipe: int = 0) -> int:
    """The largest lead: microbatches whose backward one stage has run and another has not.

    It is counted in an order of all actions that every rank and every transfer obeys. So a rank
    that sends to the other with each backward cannot deadlock by waiting, with more open sends than
    that, for the oldest: the actions that the other runs before come earlier in that order.

    Args:
        schedule: any.
        stage: the leading one.
        behind: the other.
        pipe: whose microbatches are counted.
    """
    table = tabulate(schedule)
    order = total_order(schedule, table)
    chosen = table.is_kind(*GRADIENT_KINDS)
    chosen &= np.array(schedule.microbatch_pipes)[table.microbatch] == pipe
    # For each microbatch, where its backward stands in the order; -1 for none.
    given, taken = np.full((2, schedule.num_microbatches), -1, dtype=np.int64)
    for places, number in ((given, stage), (taken, behind)):
        own = np.flatnonzero(chosen & (table.stage == number))
        places[table.microbatch[own]] = order[own]
    most = 0
    for place in given[given >= 0].tolist():
        most = max(most, int(((given >= 0) & (given <= place) & (taken > place)).sum()))
    return most
