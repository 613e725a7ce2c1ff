"""Variants of the fastest plan that a search prices, and of no other, since each takes long.

Larger microbatches need another trace. Most schedules win rarely, and then in a layout that does
well with others, too. Recomputation that fills the memory weighs every segment of every pp rank;
which schedule it makes the fastest is not known before. Context parallelism needs graphs of its own
for every degree. Its ranks share the tokens of a sample, so that a job has uses for more devices
than its samples feed; it is tried where the fastest plan waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from merak.core.errors import MerakError, ScheduleError
from merak.core.units import seconds
from merak.plan.optimizer.home import HOST
from merak.plan.price.candidate import Candidate
from merak.plan.price.price import Misfit, Price
from merak.plan.search.bounds import Pricing
from merak.plan.search.explain import degrees
from merak.plan.search.neighbours import without_idle
from merak.plan.search.pinned import Pinned
from merak.plan.search.prune import memory_rejection, state_rejection
from merak.plan.search.ranking import Ranking, Refusal, Rejected
from merak.plan.search.space import MOST_MICROBATCH
from merak.schedule import registry

MOST_CP = 64
"""Largest context parallel degree that is searched."""

_WAITS = 0.1
"""Part of a step of bubbles and exposed communication from which on it is tried."""

_RECOMPUTES_SOME = ("selective", "full")

_MOST_SPARED = 0.25
"""Part of a step that recomputes everything, which saving everything may spare."""

_AS_GOOD = 1.02
"""Step of a plan ÷ that of the fastest, up to which a larger microbatch may make it the fastest."""

_MOST_FILLED = 3
"""Plans, each of another schedule, that are priced with the recomputation that fills the memory."""


def with_variants(
    found: Ranking,
    pricing: Pricing,
    pinned: Pinned,
    top: int,
    refusal: Refusal | None,
) -> Ranking:
    """The ranking with variants of its fastest layout.

    These are larger microbatches, where it has the largest that is searched; the schedules that are
    not tried in every layout, with the microbatch, its half and twice of it; and `recompute="auto"`
    with the fastest schedules and other degrees, and with offloaded activations or an offloaded
    optimizer, of which a plan that recomputes nothing has nothing to gain. Where the fastest plan
    is such a one, the fastest that recomputes may still overtake it.

    Args:
        found: the ranking, maybe without a plan.
        pricing: prices of its candidates.
        pinned: choices that are made already, of which there are no variants.
        top: plans that are wanted.
        refusal: says which layouts the job cannot have, whatever the model; None for none.
    """
    run = _Variants(found, pricing, pinned, top, refusal)
    if found.plans and pinned.microbatch is None:
        run.enlarge_microbatches()
    if found.plans and pinned.schedule is None:
        run.try_schedules()
    if found.plans and pinned.recompute is None:
        run.fill_memory()
    return run.found


@dataclass(slots=True)
class _Variants:
    """A ranking that variants of its plans are added to.

    Args:
        found: the ranking.
        pricing: prices of its candidates.
        pinned: choices that are made already.
        top: plans that are wanted.
        refusal: says which layouts the job cannot have, whatever the model; None for none.
        tried: what has been added, or refused, by its choices.
    """

    found: Ranking
    pricing: Pricing
    pinned: Pinned
    top: int
    refusal: Refusal | None
    tried: dict[tuple[Any, ...], Price | Misfit | None] = field(default_factory=dict)

    def enlarge_microbatches(self) -> None:
        """Price twice the microbatch of the fastest plan, as long as that is faster.

        The fastest one of other degrees is tried as well, where it is as good.
        """
        fastest = dict[str, Price]()
        for own in self.found.priced:
            fastest.setdefault(degrees(own.candidate), own)
        most_s = _AS_GOOD * self.found.plans[0].step_s
        for own in fastest.values():
            if own.step_s <= most_s:
                self._enlarge(own)

    def _enlarge(self, best: Price) -> None:
        while best.candidate.microbatch >= MOST_MICROBATCH:
            if best.candidate.num_microbatches % 2:
                break
            variant = _scaled(best.candidate, 2)
            with suppress(ScheduleError):  # which the price says again
                if self.pricing.rough_bytes(variant) > self.pricing.device_bytes:
                    break
            price = self.add(variant, best, "microbatch")
            faster = _fitting(price)
            if faster is None or faster.step_s >= best.step_s:
                break
            best = faster

    def try_schedules(self) -> None:
        """Price all schedules that have no plan yet in the layout of the fastest pipeline."""
        own = next((p for p in self.found.priced if p.candidate.pp > 1), None)
        if own is None:
            return
        before, known = self.found.plans[0], self.found.kinds
        unpriced = [one for one in registry.searched() if one[0] not in known]
        for name, options in (*unpriced, *registry.searched(everywhere=False)):
            variant = replace(
                own.candidate,
                schedule=name,
                schedule_options=options,
                partition=self.pinned.partition,
            )
            with suppress(ScheduleError):  # which the price says again
                if variant.traits.num_copies > 1 and self.pinned.zero is None:
                    variant = replace(variant, zero=min(variant.zero, 1))
            price = self.add(variant, own, "schedule")
            is_misfit = price is not None and _fitting(price) is None
            if is_misfit and self.pinned.recompute is None:
                self.add(replace(variant, recompute="full"), own, "schedule")
        best = self.found.plans[0]
        if self.pinned.microbatch is None and best is not before:
            for scaled in _resized(best.candidate, self.pinned.partition):
                self.add(scaled, best, "microbatch")

    def fill_memory(self) -> None:
        """Price `recompute="auto"` with the schedules that are fastest without it.

        Each has the layout in which it is the fastest of those that recompute.
        """
        schedules = dict[str, Price]()
        for own in self.found.priced:
            if own.candidate.recompute in _RECOMPUTES_SOME and self._may_win(own):
                schedules.setdefault(own.candidate.schedule, own)
        fastest = list(schedules.values())[:_MOST_FILLED]
        if not fastest:
            return
        for own in fastest:
            self.add(self._filled(own.candidate), own, "recompute")
        self._fill_other(degrees(fastest[0].candidate))
        own = next(p for p in self.found.priced if p.candidate.recompute != "off")
        if self.pinned.offload_activations is None:
            filled = replace(self._filled(own.candidate), offload_activations="auto")
            self.add(filled, own, "offload_activations")
        if self.pinned.offload_optimizer is None:
            filled = replace(self._filled(own.candidate), offload_optimizer=HOST)
            self.add(filled, own, "offload_optimizer")

    def _fill_other(self, known: str) -> None:
        """Price `recompute="auto"` with the fastest plan of other degrees.

        Where that recomputes nothing, its memory is filled by twice the microbatch.
        """
        others = (p for p in self.found.priced if degrees(p.candidate) != known)
        own = next(others, None)
        if own is None or not self._may_win(own):
            return
        variant = own.candidate
        if variant.recompute == "off":
            if self.pinned.microbatch is not None or variant.num_microbatches % 2:
                return
            variant = _scaled(variant, 2)
        self.add(self._filled(variant), own, "recompute")

    def _may_win(self, own: Price) -> bool:
        """Whether a plan may become the fastest, by what recomputing nothing may spare it."""
        return (1.0 - _MOST_SPARED) * own.step_s <= self.found.plans[0].step_s

    def _filled(self, own: Candidate) -> Candidate:
        return replace(own, recompute="auto", partition=self.pinned.partition)

    def add(self, variant: Candidate, own: Price, choice: str) -> Price | Misfit | None:
        """Add a variant of a plan, which differs in one choice, or why it is none.

        Returns:
            Its price, or why it does not fit; None where it is refused.
        """
        if variant.choices() in self.tried:
            return self.tried[variant.choices()]
        price = self.tried[variant.choices()] = self._add(variant, own, choice)
        return price

    def _add(self, variant: Candidate, own: Price, choice: str) -> Price | Misfit | None:
        found, plans, rejected = self.found, list(self.found.plans), list(self.found.rejected)
        why = None if self.refusal is None else self.refusal(variant)
        try:
            price = self.pricing.price_if_fits(variant) if why is None else None
        except MerakError as error:
            why, price = str(error).rstrip("."), None
        if price is not None and price.candidate == own.candidate:
            return price
        fitting = _fitting(price)
        if fitting is not None:
            plans.append(fitting)
            if fitting.step_s > own.step_s:
                before = _named(own.candidate, choice)
                why = f"a step takes {fitting.step_s:.3g} s, {own.step_s:.3g} s with {before}"
        elif price is not None:
            rejection = memory_rejection(price)
            why = None if rejection is None else rejection.why
        if why is not None:
            rejected.append(Rejected(_named(variant, choice), why, 1))
        plans.sort(key=lambda plan: plan.step_s)
        self.found = replace(
            found,
            plans=tuple(plans[: self.top]),
            behind=(*plans[self.top :], *found.behind),
            rejected=tuple(rejected),
            num_priced=found.num_priced + (price is not None),
            num_candidates=found.num_candidates + 1,
        )
        return price


def _fitting(found: Price | Misfit | None) -> Price | None:
    return found if isinstance(found, Price) and found.fits else None


def _named(own: Candidate, choice: str) -> str:
    """A choice in words, such as "recompute=full"; a schedule with its options."""
    if choice != "schedule":
        return f"{choice}={getattr(own, choice)}"
    return " ".join([own.schedule, *(f"{k}={value}" for k, value in own.schedule_options.items())])


def _scaled(own: Candidate, factor: float) -> Candidate:
    """A candidate with so many times the microbatch."""
    return replace(
        own,
        microbatch=int(factor * own.microbatch),
        num_microbatches=int(own.num_microbatches / factor),
        partition=None,
    )


def _resized(own: Candidate, partition: tuple[int, ...] | None) -> Iterator[Candidate]:
    """A candidate with half and with twice the microbatch, as far as samples divide."""
    for factor, part in ((2.0, own.num_microbatches), (0.5, own.microbatch)):
        if part % 2 == 0:
            yield replace(_scaled(own, factor), partition=partition)


@dataclass(slots=True)
class ContextClimb:
    """Outcome of trying context parallelism.

    Args:
        best: the fastest plan.
        num_priced: plans that were priced.
        rejected: why no more of it is used; None where that was not asked.
    """

    best: Price
    num_priced: int = 0
    rejected: Rejected | None = None


def try_context(
    best: Price, pricing: Pricing, pinned: Pinned, refusal: Refusal | None
) -> ContextClimb:
    """Double cp from a plan on, instead of dp, pp or tp, as long as a step becomes faster.

    Args:
        best: the fastest plan without it.
        pricing: prices of the job's candidates.
        pinned: choices that are made already.
        refusal: says which layouts the job cannot have, whatever the model; None for none.
    """
    found = ContextClimb(best)
    while _waits(found.best) and found.best.candidate.cp < MOST_CP:
        prices: list[Price] = []
        why = "no more is possible"
        for own in _doubled(found.best.candidate, pinned):
            try:
                problem = None if refusal is None else refusal(own)
                state = state_rejection(own, pricing) if problem is None else None
                if problem is None and state is None:
                    prices.append(pricing.price(own))
                why = problem or (state.why if state else why)
            except MerakError as error:  # such as heads that it does not divide
                why = str(error).rstrip(".")
        found.num_priced += len(prices)
        cp = 2 * found.best.candidate.cp
        fastest = min((own for own in prices if own.fits), key=_step_s, default=None)
        if fastest is not None and fastest.step_s < found.best.step_s:
            found.best = fastest
            continue
        if fastest is not None:
            before = f"{seconds(found.best.step_s)} with {degrees(found.best.candidate)}"
            why = f"a step takes {seconds(fastest.step_s)} with {degrees(fastest.candidate)}, "
            why += before
        elif prices:
            why = "from the best plan on, it does not fit"
        found.rejected = Rejected(f"cp≥{cp}", why, len(prices))
        break
    return found


def _step_s(own: Price) -> float:
    return own.step_s


def _waits(own: Price) -> bool:
    return own.bubble_s + own.exposed_communication_s >= _WAITS * own.step_s


def _doubled(own: Candidate, pinned: Pinned) -> Iterator[Candidate]:
    """A candidate with twice the cp, and half of another degree."""
    for axis, free in _free(own, pinned).items():
        degree = getattr(own, axis)
        if degree % 2 or not free:
            continue
        count = own.num_microbatches * (2 if axis == "dp" else 1)
        half = replace(
            own,
            **{axis: degree // 2},
            cp=2 * own.cp,
            num_microbatches=count,
            sequence_parallel=False,
            sub_pipelining="off",
            partition=pinned.partition,
        )
        yield without_idle(half)


def _free(own: Candidate, pinned: Pinned) -> Mapping[str, bool]:
    """Degrees that may be halved for it."""
    return MappingProxyType(
        {
            "dp": pinned.dp is None,
            "pp": pinned.frees_pp(own.pp),
            # Experts on all ranks of a tp go with it.
            "tp": pinned.tp is None and own.ep == 1,
        }
    )
