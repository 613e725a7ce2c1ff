"""What recomputes and what waits in host memory where not all can be kept."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from merak.plan.activations.placement import Options, Whereabouts, choose
from merak.plan.activations.recompute import Parts, Position

NO_PARTS = Parts({}, {})


def options(
    again_s: Mapping[int, float],
    held: Mapping[int, int],
    copy_s: Mapping[int, float],
    may_recompute: bool = True,
    parts: Parts = NO_PARTS,
) -> Options:
    position = Position(tuple(again_s), tuple(again_s.values()), tuple(held.values()))
    return Options(position, copy_s, may_recompute, parts)


class Judge:
    """Copies are hidden up to some seconds; bytes of what is here add up."""

    def __init__(self, given: Options, hidden_s: float) -> None:
        self.given = given
        self.hidden_s = hidden_s
        self.held = dict(zip(given.position.segments, given.position.held_bytes))
        self.again = dict(zip(given.position.segments, given.position.saved_s))

    def peak(self, chosen: Whereabouts) -> int:
        assert not chosen.here & chosen.host and not chosen.partly & chosen.kept
        whole = sum(self.held[i] for i in chosen.here)
        return whole + sum(self.given.parts.held_bytes[i] for i in chosen.partly)

    def seconds(self, chosen: Whereabouts) -> tuple[float, float]:
        left = {i: s for i, s in self.again.items() if i not in chosen.kept}
        again = sum(
            s * (1 - (self.given.parts.saved_share[i] if i in chosen.partly else 0))
            for i, s in left.items()
        )
        copies = sum(self.given.copy_s[i] for i in chosen.host)
        total = again + max(0.0, copies - self.hidden_s)
        return total, total

    def choose(self, budget: int) -> Whereabouts | None:
        return choose(self.given, self.peak, self.seconds, budget)


EQUAL = dict.fromkeys(range(4), 1.0)
TEN = dict.fromkeys(range(4), 10)


def test_what_fits_stays_where_it_is() -> None:
    judge = Judge(options(EQUAL, TEN, EQUAL), 100.0)
    assert judge.choose(40) == Whereabouts(here=frozenset(range(4)))


def test_copies_that_hide_go_to_the_host() -> None:
    found = Judge(options(EQUAL, TEN, EQUAL), 100.0).choose(20)
    assert found is not None and len(found.here) >= 1 and found.kept == frozenset(range(4))


def test_copies_that_hide_nowhere_recompute() -> None:
    slow = dict.fromkeys(range(4), 50.0)
    found = Judge(options(EQUAL, TEN, slow), 0.0).choose(20)
    assert found is not None and len(found.here) == 2 and not found.host


def test_the_way_to_the_host_takes_what_is_dear_to_recompute() -> None:
    again = {0: 0.5, 1: 9.0, 2: 0.5, 3: 8.0}
    found = Judge(options(again, TEN, EQUAL), 2.0).choose(0)
    assert found == Whereabouts(host=frozenset({1, 3}))


def test_nothing_recomputes_that_must_not() -> None:
    slow = dict.fromkeys((0, 1, 3), 50.0)  # segment 2 has nothing to copy
    found = Judge(options(EQUAL, TEN, slow, may_recompute=False), 0.0).choose(20)
    assert found is not None and found.kept == frozenset(range(4)) and 2 in found.here
    assert Judge(options(EQUAL, TEN, slow, may_recompute=False), 0.0).choose(9) is None


def test_parts_of_what_recomputes_are_kept_with_what_is_left() -> None:
    parts = Parts(dict.fromkeys(range(4), 2), dict.fromkeys(range(4), 0.5))
    slow = dict.fromkeys(range(4), 50.0)
    found = Judge(options(EQUAL, TEN, slow, parts=parts), 0.0).choose(8)
    assert found == Whereabouts(partly=frozenset(range(4)))


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
    found = judge.choose(budget)
    assert found is not None and judge.peak(found) <= budget
    best = min(
        judge.seconds(other)[0]
        for places in itertools.product("hoa", repeat=len(rows))
        for other in [
            Whereabouts(
                frozenset(i for i, place in enumerate(places) if place == "h"),
                frozenset(i for i, place in enumerate(places) if place == "o"),
            )
        ]
        if judge.peak(other) <= budget
    )
    # Two of three ways to be elsewhere are always better than to recompute all of it.
    everything = judge.seconds(Whereabouts())[0]
    assert best <= judge.seconds(found)[0] <= best + 0.5 * (everything - best) + 1e-9
