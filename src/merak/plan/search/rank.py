"""Ranking of candidates: the most promising are priced first, those that cannot win never."""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from merak.core.errors import MerakError
from merak.plan.price.candidate import Candidate
from merak.plan.price.price import Misfit, Price
from merak.plan.recompute_spec import RECOMPUTES
from merak.plan.search.bounds import Pricing
from merak.plan.search.neighbours import Neighbours
from merak.plan.search.prune import (
    FitSet,
    MisfitSet,
    memory_rejection,
    slower_rejection,
    state_rejection,
)
from merak.plan.search.ranking import Cause, Rejection

MOST_PRICED = 32
"""Candidates that a search prices; what is left then is said."""

_FIRST, _LAST = 3 / 8, 3 / 4
"""Parts of them that are priced in the order of estimates before the best plan's neighbours are,
and behind them in all; a search of few candidates prices every one."""

_MOST_OF_DEGREES = 2
"""Plans of the same degrees that are enough at first: an estimate that is wrong is so for all."""

_WORTH_PRICING = 1.15
"""Neighbours that are estimated slower than the best plan by more than this are not priced."""


@dataclass(slots=True)
class Ranked:
    """Plans that fit, fastest first, and the rejections of all other candidates.

    Args:
        plans: that fit, fastest first.
        behind: those that fit as well, and are slower than the plans that are wanted.
        rejections: of all other candidates.
        misfits: those that were priced and do not fit.
        num_priced: candidates that were priced.
        is_proved: whether no other candidate can be faster than the first plan.
    """

    plans: list[Price] = field(default_factory=list)
    behind: list[Price] = field(default_factory=list)
    rejections: list[Rejection] = field(default_factory=list)
    misfits: list[Price | Misfit] = field(default_factory=list)
    num_priced: int = 0
    is_proved: bool = True


def rank(
    candidates: Iterable[Candidate], pricing: Pricing, top: int, most_priced: int = MOST_PRICED
) -> Ranked:
    """Find the fastest candidates that fit.

    Args:
        candidates: the space.
        pricing: prices and bounds.
        top: plans that are wanted.
        most_priced: candidates that may be priced; the first plan is proved where they suffice.
    """
    run = _Run(pricing, top, most_priced)
    waiting: list[Candidate] = []
    for candidate in candidates:
        rejection = state_rejection(candidate, pricing)
        if rejection is None:
            waiting.append(candidate)
        else:
            run.found.rejections.append(rejection)
    in_order = list(_in_order(waiting, pricing, run.found))
    run.take(in_order, math.ceil(_FIRST * most_priced), _MOST_OF_DEGREES)
    neighbours = Neighbours(in_order)
    run.climb(neighbours)
    is_small = len(in_order) <= most_priced
    run.take(in_order, most_priced if is_small else math.ceil(_LAST * most_priced))
    run.climb(neighbours)
    run.finish(in_order)
    return run.found


@dataclass(slots=True)
class _Run:
    """One ranking, candidate by candidate.

    Args:
        pricing: prices and bounds.
        top: plans that are wanted.
        most_priced: candidates that may be priced.
    """

    pricing: Pricing
    top: int
    most_priced: int
    found: Ranked = field(default_factory=Ranked)
    _misfits: MisfitSet = field(default_factory=MisfitSet)
    _fitting: FitSet = field(default_factory=FitSet)
    _seen: set[int] = field(default_factory=set)
    _best: Candidate | None = None

    def take(
        self, candidates: Iterable[Candidate], most: int, most_of_degrees: float = math.inf
    ) -> None:
        """Price or reject candidates, one after another, until so many are priced in all.

        Args:
            candidates: in the order of their estimates.
            most: candidates that may be priced, with those that are.
            most_of_degrees: plans of the same degrees behind which further ones are passed over.
        """
        of_degrees = Counter(_degrees(own.candidate) for own in self.found.plans)
        for candidate in candidates:
            if self.found.num_priced >= most:
                return
            degrees = _degrees(candidate)
            if id(candidate) not in self._seen and of_degrees[degrees] < most_of_degrees:
                self._seen.add(id(candidate))
                of_degrees[degrees] += self._consider(candidate)

    def climb(self, neighbours: Neighbours) -> None:
        """Go from the best plan to the first neighbour that is better, until there is none."""
        before = None
        while self._best is not before:
            before = self._best
            assert before is not None
            most_s = _WORTH_PRICING * self.pricing.rough_s(before)
            for own in neighbours.of(before):
                if self._best is before and self.pricing.rough_s(own) <= most_s:
                    self.take([own], self.most_priced)

    def finish(self, candidates: Iterable[Candidate]) -> None:
        """Leave out the candidates for which no price is left."""
        found, pricing = self.found, self.pricing
        unpriced = []
        for candidate in (own for own in candidates if id(own) not in self._seen):
            rejection = self._rejection(candidate, quick=True)
            if rejection is None:
                unpriced.append(candidate)
            else:
                found.rejections.append(rejection)
        if not found.plans and found.misfits:  # else the model or the options refuse all of them
            unpriced = _until_one_fits(unpriced, pricing, found, self._misfits)
        for candidate in unpriced:
            _leave_out(candidate, pricing, found)
        found.behind = found.plans[self.top :]
        found.rejections += [_behind(own) for own in found.behind]
        del found.plans[self.top :]

    def _consider(self, candidate: Candidate) -> bool:
        """Price or reject a candidate, and tell whether it is a plan."""
        rejection = self._rejection(candidate, quick=False)
        if rejection is not None:
            self.found.rejections.append(rejection)
            return False
        fastest = self.found.plans[0] if self.found.plans else None
        if not _price(candidate, self.pricing, self.found, self._misfits):
            return False
        self._fitting.add(candidate)
        if self.found.plans[0] is not fastest:
            self._best = candidate
        return True

    def _rejection(self, candidate: Candidate, quick: bool) -> Rejection | None:
        plans = self.found.plans
        slowest_s = plans[self.top - 1].step_s if len(plans) >= self.top else float("inf")
        return (
            self._misfits.find(candidate)
            or self._fitting.find(candidate)
            or slower_rejection(candidate, self.pricing, slowest_s, quick)
        )


def _in_order(waiting: list[Candidate], pricing: Pricing, found: Ranked) -> Iterable[Candidate]:
    """Candidates by their rough estimates; of equal ones, the one with the least switched on.

    Those that are estimated to be too large come last.
    """
    keyed = []
    for number, candidate in enumerate(waiting):
        try:
            rough_s = pricing.rough_s(candidate)
            is_large = pricing.rough_bytes(candidate) > pricing.device_bytes
        except MerakError as error:
            found.rejections.append(Rejection(candidate, Cause.REFUSED, str(error)))
            continue
        level = _recompute_level(candidate)
        keyed.append((is_large, rough_s, candidate.zero, level, number))
    return [waiting[key[-1]] for key in sorted(keyed)]


def _degrees(own: Candidate) -> tuple[int, ...]:
    return own.dp, own.tp, own.pp, own.cp, own.ep


def _recompute_level(candidate: Candidate) -> int:
    known = candidate.recompute in RECOMPUTES
    return RECOMPUTES.index(str(candidate.recompute)) if known else 0


def _price(candidate: Candidate, pricing: Pricing, found: Ranked, misfits: MisfitSet) -> bool:
    found.num_priced += 1
    try:
        price = pricing.price_if_fits(candidate)
    except MerakError as error:
        found.rejections.append(Rejection(candidate, Cause.REFUSED, str(error)))
        return False
    rejection = memory_rejection(price)
    if rejection is None:
        assert isinstance(price, Price)
        bisect.insort(found.plans, price, key=lambda own: own.step_s)
        return True
    found.misfits.append(price)
    rejection = replace(rejection, candidate=candidate)
    found.rejections.append(rejection)
    misfits.add(rejection)
    return False


def _until_one_fits(
    unpriced: list[Candidate], pricing: Pricing, found: Ranked, misfits: MisfitSet
) -> list[Candidate]:
    """Price candidates, the least memory first, until one fits; return those that are left."""
    leanest = sorted(unpriced, key=pricing.rough_bytes)
    for number, candidate in enumerate(leanest):
        rejection = misfits.find(candidate)
        if rejection is not None:
            found.rejections.append(rejection)
        elif _price(candidate, pricing, found, misfits):
            return leanest[number + 1 :]
    return []


def _leave_out(candidate: Candidate, pricing: Pricing, found: Ranked) -> None:
    """Leave out a candidate for which no price is left."""
    if not found.plans or pricing.quick_bound_s(candidate) < found.plans[0].step_s:
        found.is_proved = False
    why = "estimated slower, and not priced"
    found.rejections.append(Rejection(candidate, Cause.UNPRICED, why, pricing.rough_s(candidate)))


def _behind(price: Price) -> Rejection:
    why = f"a step takes {price.step_s:.3g} s"
    return Rejection(price.candidate, Cause.SLOWER, why, price.step_s)
