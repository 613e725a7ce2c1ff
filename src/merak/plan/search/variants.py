"""Variants of the fastest plan that a search prices, and of no other, since each takes long.

Whole experts on every rank need another rewrite of the graph, larger microbatches another trace,
and recomputation that fills the memory weighs every segment of every pp rank.
"""

from __future__ import annotations

from dataclasses import replace

from merak.core.errors import MerakError
from merak.graph.tensor_parallel.search.expert_weights import num_experts
from merak.plan.price.candidate import Candidate
from merak.plan.price.workload import Workload
from merak.plan.search.bounds import Pricing
from merak.plan.search.pinned import Pinned
from merak.plan.search.prune import memory_rejection
from merak.plan.search.ranking import Ranking, Refusal, Rejected
from merak.plan.search.space import MOST_MICROBATCH

_RECOMPUTES_SOME = ("selective", "full")


def with_variants(
    found: Ranking,
    workload: Workload,
    pricing: Pricing,
    pinned: Pinned,
    top: int,
    refusal: Refusal | None,
) -> Ranking:
    """The ranking with variants of its fastest layout.

    These are larger microbatches, where it has the largest that is searched; whole experts, where
    tensor parallelism splits them (over replicas they are searched with all the rest); and
    `recompute="auto"`, of which a plan that recomputes nothing has nothing to gain.

    Args:
        found: the ranking, maybe without a plan.
        workload: the job.
        pricing: prices of its candidates.
        pinned: choices that are made already, of which there are no variants.
        top: plans that are wanted.
        refusal: says which layouts the job cannot have, whatever the model; None for none.
    """
    if found.plans and pinned.microbatch is None:
        found = _with_larger_microbatches(found, pricing, top, refusal)
    if found.plans and pinned.ep is None:
        best = found.plans[0].candidate
        if best.tp > 1 and num_experts(workload.graph(best.microbatch)):
            variant = replace(best, ep=best.tp, partition=None)
            found = _with_variant(found, variant, "ep", pricing, top, refusal)
    if found.plans and pinned.recompute is None:
        best = found.plans[0].candidate
        if best.recompute in _RECOMPUTES_SOME:
            variant = replace(best, recompute="auto", partition=None)
            found = _with_variant(found, variant, "recompute", pricing, top, refusal)
    return found


def _with_larger_microbatches(
    found: Ranking, pricing: Pricing, top: int, refusal: Refusal | None
) -> Ranking:
    """The ranking with twice the microbatch of the fastest plan, as long as that is faster."""
    while True:
        best = found.plans[0].candidate
        if best.microbatch < MOST_MICROBATCH or best.num_microbatches % 2:
            break
        variant = replace(
            best,
            microbatch=2 * best.microbatch,
            num_microbatches=best.num_microbatches // 2,
            partition=None,
        )
        if pricing.rough_bytes(variant) > pricing.device_bytes:
            break
        found = _with_variant(found, variant, "microbatch", pricing, top, refusal)
        if found.plans[0].candidate.microbatch != variant.microbatch:
            break
    return found


def _with_variant(
    found: Ranking,
    variant: Candidate,
    choice: str,
    pricing: Pricing,
    top: int,
    refusal: Refusal | None,
) -> Ranking:
    """The ranking with a variant of its fastest plan, which differs in the choice of that name."""
    own, plans, rejected = found.plans[0], list(found.plans), list(found.rejected)
    why = None if refusal is None else refusal(variant)
    try:
        price = pricing.price(variant) if why is None else None
    except MerakError as error:
        why, price = str(error).rstrip("."), None
    if price is not None and price.candidate == own.candidate:
        return found
    if price is not None and price.fits:
        plans.append(price)
        if price.step_s > own.step_s:
            before = f"{choice}={getattr(own.candidate, choice)}"
            why = f"a step takes {price.step_s:.3g} s, {own.step_s:.3g} s with {before}"
    elif price is not None:
        rejection = memory_rejection(price)
        why = None if rejection is None else rejection.why
    if why is not None:
        rejected.append(Rejected(f"{choice}={getattr(variant, choice)}", why, 1))
    plans.sort(key=lambda plan: plan.step_s)
    return replace(
        found,
        plans=tuple(plans[:top]),
        behind=(*plans[top:], *found.behind),
        rejected=tuple(rejected),
        num_priced=found.num_priced + (price is not None),
        num_candidates=found.num_candidates + 1,
    )
