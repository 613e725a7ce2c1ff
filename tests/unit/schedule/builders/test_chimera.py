"""Chimera against its paper's figures and tables (arXiv 2107.06925)."""

from __future__ import annotations

import pytest

from merak.schedule.registry import build
from tests.unit.schedule.grid import simulated

SIZES = [
    (depth, pairs)
    for depth in (2, 4, 6, 8, 12, 16)
    for pairs in range(1, depth // 2 + 1)
    if depth // 2 % pairs == 0
]


@pytest.mark.parametrize(("depth", "pairs"), SIZES)
def test_equal_slots_merge_without_conflict(depth: int, pairs: int) -> None:
    """Figures 3 and 8: 2(D/2f - 1) bubbles; units of D follow one another without a gap."""
    for units in (1, 2, 3):
        num_microbatches = units * depth
        simulation = simulated("chimera", depth, num_microbatches, backward_s=1.0, pairs=pairs)
        bubbles = depth // pairs - 2
        assert simulation.makespan == 2 * num_microbatches + bubbles


@pytest.mark.parametrize(("depth", "pairs"), SIZES)
def test_one_unit_has_the_bubbles_of_figure_2(depth: int, pairs: int) -> None:
    """Backwards twice as long leave middle bubbles: (D - 2) / (3N/2 + D - 2) for one pair."""
    simulation = simulated("chimera", depth, depth, pairs=pairs)
    bubbles = depth / pairs - 2
    assert simulation.makespan == 3 * depth + 2 * bubbles
    assert simulation.bubble_fraction == pytest.approx(bubbles / (1.5 * depth + bubbles))


@pytest.mark.parametrize(("depth", "pairs"), SIZES)
@pytest.mark.parametrize("method", ["forward_doubling", "backward_halving"])
def test_equalised_slots_have_the_bubble_ratio_of_tables_2_and_3(
    depth: int, pairs: int, method: str
) -> None:
    """(D - 2f) / (2fN + D - 2f), for any number of units of 2D."""
    for units in (1, 2, 3):
        n = 2 * depth * units
        simulation = simulated("chimera", depth, n, pairs=pairs, method=method, recompute=False)
        bubbles = depth - 2 * pairs
        assert simulation.bubble_fraction == pytest.approx(bubbles / (2 * pairs * n + bubbles))


@pytest.mark.parametrize(("depth", "pairs"), SIZES)
def test_activations_are_those_of_tables_2_and_3(depth: int, pairs: int) -> None:
    """From D - D/2f + 1 to D microbatches in flight."""
    in_flight = simulated("chimera", depth, 2 * depth, pairs=pairs).peak_in_flight
    assert min(in_flight) == depth - depth // (2 * pairs) + 1
    assert max(in_flight) == depth


@pytest.mark.parametrize(("depth", "pairs"), SIZES)
def test_every_rank_holds_2f_stages_once(depth: int, pairs: int) -> None:
    schedule = build("chimera", depth, depth, pairs=pairs)
    assert len(schedule.pipes) == 2 * pairs
    assert all(len(schedule.stages_of(rank)) == 2 * pairs for rank in range(depth))
    assert all(len(schedule.ranks_of(stage)) == 2 * pairs for stage in range(depth))


def test_four_pipes_of_eight_stages_lie_as_in_figure_8() -> None:
    assert build("chimera", 8, 8, pairs=2).pipes == (
        (0, 1, 2, 3, 4, 5, 6, 7),
        (7, 6, 5, 4, 3, 2, 1, 0),
        (4, 5, 6, 7, 0, 1, 2, 3),
        (3, 2, 1, 0, 7, 6, 5, 4),
    )


@pytest.mark.parametrize("num_microbatches", range(1, 9))
def test_fewer_microbatches_than_stages_are_spread_evenly(num_microbatches: int) -> None:
    schedule = build("chimera", 8, num_microbatches)
    down = schedule.microbatch_pipes.count(0)
    assert down == (num_microbatches + 1) // 2
    assert down + schedule.microbatch_pipes.count(1) == num_microbatches


def test_residual_microbatches_follow_the_doubled_units() -> None:
    schedule = build("chimera", 4, 12, method="forward_doubling")
    assert schedule.microbatch_pipes == (0,) * 4 + (1,) * 4 + (0, 0, 1, 1)


def test_only_forward_doubling_recomputes_unless_asked() -> None:
    flags = {
        method: build("chimera", 4, 8, method=method).recompute[0]
        for method in ("direct", "forward_doubling", "backward_halving")
    }
    assert flags == {"direct": False, "forward_doubling": True, "backward_halving": False}
    assert build("chimera", 4, 8, recompute=True).recompute == (True,) * 4


@pytest.mark.parametrize("depth", range(4, 17, 2))
def test_only_the_middle_stages_are_not_reduced_eagerly(depth: int) -> None:
    """Stage D/2 is complete on the middle ranks with no bubble left; D/2 - 1 ends their lists."""
    eager = build("chimera", depth, depth).eager_reduction
    assert [stage for stage, flag in enumerate(eager) if not flag] == [depth // 2]


def test_middle_stages_are_reduced_eagerly_on_request() -> None:
    assert build("chimera", 4, 4, eager_middle=True).eager_reduction == (True,) * 4


def test_table_2_bubbles_of_the_others() -> None:
    for depth in (4, 8):
        for n in (depth, 4 * depth):
            for name in ("gpipe", "1f1b"):
                fraction = simulated(name, depth, n).bubble_fraction
                assert fraction == pytest.approx((depth - 1) / (n + depth - 1))
    # GEMS approaches (D - 1) / (D + 1/2).
    assert simulated("gems", 4, 2000).bubble_fraction == pytest.approx(3 / 4.5, abs=1e-3)
