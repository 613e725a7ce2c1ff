"""Rules that drop candidates before they are priced; each has a bound, or another price to show.

- State: parameters, gradients and optimizer alone are more than the largest device holds. They are
  no less on the fullest rank than the mean of the pp ranks, and than those of one segment.
- Memory: a candidate that takes no more memory was priced and does not fit: the same layout with
  a smaller microbatch, more recomputation, a higher ZeRO stage up to 2, or the sequence sharded.
- Saved: the same layout with less recomputation was priced and fits; recomputing takes time.
- Slower: the least time of a step is no less than that of the last plan of the ranking.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from merak.core.errors import MerakError
from merak.core.units import size
from merak.plan.price.candidate import Candidate
from merak.plan.price.price import Misfit, Price
from merak.plan.recompute_spec import RECOMPUTES
from merak.plan.search.bounds import Pricing
from merak.plan.search.ranking import Cause, Rejection


def state_rejection(candidate: Candidate, pricing: Pricing) -> Rejection | None:
    """Reject a candidate whose parameters, gradients and optimizer do not fit, or cannot be."""
    try:
        held, most = pricing.state_bytes(candidate), pricing.device_bytes
    except MerakError as error:
        return Rejection(candidate, Cause.REFUSED, str(error))
    if held <= most:
        return None
    why = (
        f"parameters, gradients and optimizer take {size(int(held))} a device of {size(int(most))}"
    )
    return Rejection(candidate, Cause.STATE, why, held / most)


def memory_rejection(found: Price | Misfit) -> Rejection | None:
    """Reject a candidate that was priced and does not fit."""
    if isinstance(found, Misfit):
        return _too_large(found.candidate, found.rank, found.peak_bytes, found.device_bytes)
    if found.fits:
        return None
    host = found.host
    if host.usable_bytes is not None and not host.fits:
        return _too_large(found.candidate, None, host.needed_bytes, host.usable_bytes)
    sizes = list(zip(found.peak_memory_bytes, found.device_bytes, strict=True))
    rank = max(range(len(sizes)), key=lambda own: sizes[own][0] / sizes[own][1])
    return _too_large(found.candidate, rank, *sizes[rank])


def _too_large(candidate: Candidate, rank: int | None, held: int, most: float) -> Rejection:
    if rank is None:
        why = f"{size(held)} in the memory of a host of {size(int(most))}"
        return Rejection(candidate, Cause.MEMORY, why, held / max(most, 1.0))
    where = f"pp rank {rank} of {size(int(most))}" if candidate.pp > 1 else size(int(most))
    why = f"{size(held)} on {where}" if candidate.pp > 1 else f"{size(held)} of {where}"
    return Rejection(candidate, Cause.MEMORY, why, held / most)


@dataclass(slots=True)
class MisfitSet:
    """Candidates that do not fit, for the rule on those that take as much memory or more."""

    _found: dict[Any, list[tuple[tuple[int, ...], Rejection]]] = field(default_factory=dict)

    def add(self, rejection: Rejection) -> None:
        """Add one that was priced."""
        key, levels = _memory_levels(rejection.candidate)
        if levels:
            self._found.setdefault(key, []).append((levels, rejection))

    def find(self, candidate: Candidate) -> Rejection | None:
        """The rejection of a candidate that takes at least as much as one of them."""
        key, levels = _memory_levels(candidate)
        if not levels:
            return None
        for other, rejection in self._found.get(key, ()):
            if all(own >= less for own, less in zip(levels, other, strict=True)):
                why = f"at least {rejection.why}"
                return Rejection(candidate, Cause.MEMORY, why, rejection.excess)
        return None


_LEVELS = ("microbatch", "num_microbatches", "recompute", "zero", "sequence_parallel")
"""Fields of which more takes more memory, or less."""


def _memory_levels(candidate: Candidate) -> tuple[Any, tuple[int, ...]]:
    """What candidates must share to be compared, and the levels on which more takes more memory."""
    key = (*candidate.choices(*_LEVELS), candidate.zero == 3)
    if candidate.recompute not in RECOMPUTES:
        return key, ()
    return key, (
        candidate.microbatch,
        -RECOMPUTES.index(candidate.recompute),
        -candidate.zero,
        -int(candidate.sequence_parallel),
    )


@dataclass(slots=True)
class FitSet:
    """Candidates that fit, for the rule on those that recompute more."""

    _found: dict[Any, int] = field(default_factory=dict)

    def add(self, candidate: Candidate) -> None:
        """Add one that was priced."""
        if candidate.recompute in RECOMPUTES:
            key, level = _without_recompute(candidate)
            self._found[key] = min(level, self._found.get(key, level))

    def find(self, candidate: Candidate) -> Rejection | None:
        """The rejection of a candidate that recomputes more than one of them."""
        if candidate.recompute not in RECOMPUTES:
            return None
        key, level = _without_recompute(candidate)
        if self._found.get(key, level) >= level:
            return None
        why = "it fits without so much recomputation"
        return Rejection(candidate, Cause.SAVED, why)


def _without_recompute(candidate: Candidate) -> tuple[Any, int]:
    """All choices but recomputation, and how much of that there is."""
    level = RECOMPUTES.index(str(candidate.recompute))
    return candidate.choices("recompute"), level


def slower_rejection(
    candidate: Candidate, pricing: Pricing, slowest_s: float, quick: bool = False
) -> Rejection | None:
    """Reject a candidate that cannot be among the plans of the ranking.

    Args:
        candidate: one.
        pricing: for its bound.
        slowest_s: of a step of the ranking's last plan; infinite while there are too few.
        quick: whether to reject by bounds alone that take no time to find.
    """
    if slowest_s == math.inf:
        return None
    bound_s = pricing.quick_bound_s(candidate) if quick else pricing.bound_s(candidate)
    if bound_s < slowest_s:
        return None
    why = f"a step takes {bound_s:.3g} s at least"
    return Rejection(candidate, Cause.SLOWER, why, bound_s)
