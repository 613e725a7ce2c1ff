"""What recomputes and what waits in offloaded memory where not all can be saved."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from merak.plan.activations.placement import Placement, PlacementOptions, choose_placement
from merak.plan.activations.recompute import PartialSaving, RankSegments

NO_PARTIAL = PartialSaving({}, {})


def options(
    again_s: Mapping[int, float],
    held: Mapping[int, int],
    copy_s: Mapping[int, float],
    may_recompute: bool = True,
    parts: PartialSaving = NO_PARTIAL,
) -> PlacementOptions:
    segments = RankSegments(tuple(again_s), tuple(again_s.values()), tuple(held.values()))
    return PlacementOptions(segments, copy_s, may_recompute, parts)


class Judge:
    """Copies are hidden up to some seconds; bytes of what is on_device add up."""

    def __init__(self, given: PlacementOptions, hidden_s: float) -> None:
        self.given = given
        self.hidden_s = hidden_s
        self.held = dict(zip(given.rank.segments, given.rank.saved_bytes))
        self.again = dict(zip(given.rank.segments, given.rank.recompute_s))

    def peak(self, chosen: Placement) -> int:
        assert not chosen.on_device & chosen.offloaded and not chosen.selective & chosen.saved
        whole = sum(self.held[i] for i in chosen.on_device)
        return whole + sum(self.given.partial_saving.saved_bytes[i] for i in chosen.selective)

    def seconds(self, chosen: Placement) -> tuple[float, float]:
        left = {i: s for i, s in self.again.items() if i not in chosen.saved}
        again = sum(
            s - (self.given.partial_saving.spared_s[i] if i in chosen.selective else 0)
            for i, s in left.items()
        )
        copies = sum(self.given.copy_s[i] for i in chosen.offloaded)
        total = again + max(0.0, copies - self.hidden_s)
        return total, total

    def choose_placement(self, budget: int) -> Placement | None:
        return choose_placement(self.given, self.peak, self.seconds, budget)


EQUAL = dict.fromkeys(range(4), 1.0)
TEN = dict.fromkeys(range(4), 10)


def test_what_fits_stays_where_it_is() -> None:
    judge = Judge(options(EQUAL, TEN, EQUAL), 100.0)
    assert judge.choose_placement(40) == Placement(on_device=frozenset(range(4)))


def test_copies_that_hide_go_to_the_host() -> None:
    found = Judge(options(EQUAL, TEN, EQUAL), 100.0).choose_placement(20)
    assert found is not None and len(found.on_device) >= 1 and found.saved == frozenset(range(4))


def test_copies_that_hide_nowhere_recompute() -> None:
    slow = dict.fromkeys(range(4), 50.0)
    found = Judge(options(EQUAL, TEN, slow), 0.0).choose_placement(20)
    assert found is not None and len(found.on_device) == 2 and not found.offloaded


def test_the_way_to_the_host_takes_what_is_dear_to_recompute() -> None:
    again = {0: 0.5, 1: 9.0, 2: 0.5, 3: 8.0}
    found = Judge(options(again, TEN, EQUAL), 2.0).choose_placement(0)
    assert found == Placement(offloaded=frozenset({1, 3}))


def test_nothing_recomputes_that_must_not() -> None:
    slow = dict.fromkeys((0, 1, 3), 50.0)  # segment 2 has nothing to copy
    found = Judge(options(EQUAL, TEN, slow, may_recompute=False), 0.0).choose_placement(20)
    assert found is not None and found.saved == frozenset(range(4)) and 2 in found.on_device
    assert Judge(options(EQUAL, TEN, slow, may_recompute=False), 0.0).choose_placement(9) is None


def test_parts_of_what_recomputes_are_kept_with_what_is_left() -> None:
    parts = PartialSaving(dict.fromkeys(range(4), 2), dict.fromkeys(range(4), 0.5))
    slow = dict.fromkeys(range(4), 50.0)
    found = Judge(options(EQUAL, TEN, slow, parts=parts), 0.0).choose_placement(8)
    assert found == Placement(selective=frozenset(range(4)))


numbers = st.integers(1, 9)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=5),
    st.floats(0, 20),
    st.integers(0, 30),
)
def test_it_fits_and_is_near_the_best(
    rows: list[tuple[int, int, int]], hidden_s: float, budget: int
) -> None:
    again, held, copy = (dict(enumerate(map(float, column))) for column in zip(*rows))
    judge = Judge(options(again, {i: int(b) for i, b in held.items()}, copy), hidden_s)
    found = judge.choose_placement(budget)
    assert found is not None and judge.peak(found) <= budget
    best = min(
        judge.seconds(other)[0]
        for places in itertools.product("hoa", repeat=len(rows))
        for other in [
            Placement(
                frozenset(i for i, place in enumerate(places) if place == "h"),
                frozenset(i for i, place in enumerate(places) if place == "o"),
            )
        ]
        if judge.peak(other) <= budget
    )
    # Two of three ways to be elsewhere are always better than to recompute all of it.
    everything = judge.seconds(Placement())[0]
    assert best <= judge.seconds(found)[0] <= best + 0.5 * (everything - best) + 1e-9
