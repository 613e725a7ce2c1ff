"""Ranking of candidates: the most promising are priced first, those that cannot win never."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from merak.core.errors import MerakError
from merak.plan.price.candidate import Candidate
from merak.plan.price.price import Misfit, Price
from merak.plan.search.bounds import Pricing
from merak.plan.search.prune import (
    FitSet,
    MisfitSet,
    memory_rejection,
    slower_rejection,
    state_rejection,
)
from merak.plan.search.ranking import Cause, Rejection
from merak.plan.search.space import RECOMPUTES

MOST_PRICED = 32
"""Candidates that a search prices; what is left then is said."""


@dataclass(slots=True)
class Ranked:
    """Outcome of ranking.

    Args:
        plans: that fit, fastest first.
        rejections: of all other candidates.
        misfits: those that were priced and do not fit.
        num_priced: candidates that were priced.
        is_proved: whether no other candidate can be faster than the first plan.
    """

    plans: list[Price] = field(default_factory=list)
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
    found = Ranked()
    misfits, fitting = MisfitSet(), FitSet()
    waiting: list[Candidate] = []
    unpriced: list[Candidate] = []
    for candidate in candidates:
        rejection = state_rejection(candidate, pricing)
        if rejection is None:
            waiting.append(candidate)
        else:
            found.rejections.append(rejection)
    for candidate in _in_order(waiting, pricing, found):
        slowest_s = found.plans[top - 1].step_s if len(found.plans) >= top else float("inf")
        rejection = (
            misfits.find(candidate)
            or fitting.find(candidate)
            or slower_rejection(candidate, pricing, slowest_s, found.num_priced >= most_priced)
        )
        if rejection is not None:
            found.rejections.append(rejection)
            continue
        if found.num_priced >= most_priced:
            unpriced.append(candidate)
        elif _price(candidate, pricing, found, misfits):
            fitting.add(candidate)
    if not found.plans and found.misfits:  # else the model or the options refuse what was priced
        unpriced = _until_one_fits(unpriced, pricing, found, misfits)
    for candidate in unpriced:
        _leave_out(candidate, pricing, found)
    found.rejections += [_behind(own) for own in found.plans[top:]]
    del found.plans[top:]
    return found


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
