"""Choices of a job that no search makes, and that cost its first plan much: said beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from merak.core import units
from merak.plan.cost.float32_products import float32_products
from merak.plan.price.candidate import Form
from merak.plan.price.price import Price
from merak.plan.price.workload import Workload

_WORTH_SAYING = 0.05
"""Part of a step from which on what tied weights cost is said."""


def slow_choices(price: Price, workload: Workload) -> Iterator[str]:
    """Sentences on what makes a plan slow that no other plan would change, and what would.

    Args:
        price: of the plan.
        workload: the job.
    """
    yield from _tied_weights(price, workload)
    form = Form(price.candidate.microbatch)
    segments, count = workload.local_graph(form).segments, Counter(workload.unique(form))
    in_float32 = float32_products((segments[i].graph, times) for i, times in count.items())
    if in_float32 is not None:
        yield in_float32


def _tied_weights(price: Price, workload: Workload) -> Iterator[str]:
    """What exchanges of their gradients cost; a plan without pipelines has none."""
    if workload.common.exact_tied_gradients and price.tied_s > _WORTH_SAYING * price.step_s:
        yield (
            f"{units.seconds(price.tied_s)} of the first plan's step are gradients of tied "
            "weights, which pp ranks exchange after every microbatch; tied_gradients='step' "
            "(--tied-gradients step) exchanges them once"
        )
