from __future__ import annotations

import pytest

from merak.core.errors import ArgumentsError
from merak.engine.health.status import RankStatus, Wait
from merak.engine.health.watchdog import check_limit, describe
from merak.schedule.ir import parse_action


@pytest.mark.parametrize("limit_s", [0.0, -1.0, float("nan")])
def test_a_limit_is_a_time(limit_s: float) -> None:
    with pytest.raises(ArgumentsError, match="is not a time to wait; use a number of seconds"):
        check_limit(limit_s)


@pytest.mark.parametrize(
    "status,said",
    [
        (
            RankStatus("step 3", parse_action("1W2"), Wait("the gradient from", (5,)), 0.0),
            "stands at 1W2 (stage 1, weight gradient, microbatch 2) of step 3 and has waited 7.0 s "
            "for the gradient from rank 5",
        ),
        (
            RankStatus("step 3", parse_action("1R2"), None, 0.0),
            "stands at 1R2 (stage 1, recompute, microbatch 2) of step 3 and has computed for "
            "7.0 s, without a wait of its own",
        ),
        (
            RankStatus("", None, Wait("what batches there are on", (1, 2)), 0.0),
            "stands between steps and has waited 7.0 s for what batches there are on ranks 1, 2",
        ),
    ],
)
def test_where_a_rank_stands_in_words(status: RankStatus, said: str) -> None:
    assert describe(status, 7.0) == said
