"""Zero-bubble schedules, built for equal stages, where the last stage is far heavier."""

from __future__ import annotations

import pytest

from merak.schedule.costs import stage_costs
from merak.schedule.registry import build
from merak.schedule.simulator.simulate import simulate
from tests.tiers import one_in

SPLIT = ("zero_bubble_h1", "zero_bubble_v", "interleaved_zero_bubble", "dualpipe_v")


@one_in(5)
@pytest.mark.parametrize("times", [(8, 8, 8), (64, 64, 64), (1, 8, 64), (64, 1, 8), (8, 64, 0)])
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 8), (4, 8), (8, 32)])
@pytest.mark.parametrize("name", SPLIT)
def test_the_busiest_rank_hardly_waits(
    name: str, num_ranks: int, num_microbatches: int, times: tuple[float, ...]
) -> None:
    """At most a fifth more than its work, and the passes of one microbatch over other stages."""
    schedule = build(name, num_ranks, num_microbatches)
    own = [((1.0,) * (schedule.num_stages - 1) + (float(seconds),)) for seconds in times]
    forward_s, input_s, weight_s = own
    backward_s = tuple(map(sum, zip(input_s, weight_s, strict=True)))
    costs = stage_costs(forward_s, backward_s, input_gradient_s=input_s, weight_gradient_s=weight_s)
    work = [0.0] * num_ranks
    for stage, rank in enumerate(schedule.pipes[0]):
        work[rank] += num_microbatches * (forward_s[stage] + backward_s[stage])
    passes = sum(forward_s[:-1]) + sum(input_s[:-1])
    assert simulate(schedule, costs).makespan <= 1.2 * max(work) + passes
