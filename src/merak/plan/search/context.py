"""Context parallelism of the fastest plan, which a search tries where that plan waits.

It needs graphs of its own for every degree. Its ranks share the tokens of a sample, so that a job
has uses for more devices than its samples feed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from merak.core.errors import MerakError
from merak.core.units import seconds
from merak.plan.price.candidate import Candidate
from merak.plan.price.price import Price
from merak.plan.search.bounds import Pricing
from merak.plan.search.explain import degrees
from merak.plan.search.neighbours import without_idle
from merak.plan.search.pinned import Pinned
from merak.plan.search.prune import state_rejection
from merak.plan.search.ranking import Refusal, Rejected

MOST_CP = 64
"""Largest context parallel degree that is searched."""

_WAITS = 0.1
"""Part of a step of bubbles and exposed communication from which on it is tried."""


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
