"""Choices of a job that no search makes, and that cost its first plan much: said beside it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

import torch

from merak.core import units
from merak.plan.cost.operators import node_work
from merak.plan.price.candidate import Form
from merak.plan.price.price import Price
from merak.plan.price.workload import Workload

_WORTH_SAYING = 0.05
"""Part of a step, or of the products, from which on something is said."""


def slow_choices(price: Price, workload: Workload) -> Iterator[str]:
    """Sentences on what makes a plan slow that no other plan would change, and what would.

    Args:
        price: of the plan.
        workload: the job.
    """
    yield from _tied_weights(price, workload)
    if workload.autocast is not None:
        yield from _products_in_float32(price, workload)


def _tied_weights(price: Price, workload: Workload) -> Iterator[str]:
    """What exchanges of their gradients cost; a plan without pipelines has none."""
    if workload.tied_gradients == "microbatch" and price.tied_s > _WORTH_SAYING * price.step_s:
        yield (
            f"{units.seconds(price.tied_s)} of the first plan's step are gradients of tied "
            "weights, which pp ranks exchange after every microbatch; tied_gradients='step' "
            "(--tied-gradients step) exchanges them once"
        )


def _products_in_float32(price: Price, workload: Workload) -> Iterator[str]:
    """Operators that autocast leaves as they are, such as products with experts in groups."""
    form = Form(price.candidate.microbatch)
    segments, first = workload.local_graph(form).segments, workload.unique(form)
    count = Counter(first)
    flops: dict[tuple[str, torch.dtype], float] = defaultdict(float)
    for index, times in count.items():
        for node in segments[index].graph.nodes:
            for own in node_work(node, "cuda").forward:
                flops[_name(node.target), own.dtype] += own.flops * times
    slow = {name: own for (name, dtype), own in flops.items() if dtype == torch.float32 and own}
    share = sum(slow.values()) / max(sum(flops.values()), 1.0)
    if share > _WORTH_SAYING:
        low = str(workload.autocast).removeprefix("torch.")
        yield (
            f"{share:.0%} of the products are in float32, since autocast does not cast "
            f"{max(slow, key=lambda name: slow[name])}; with parameters in {low} and float32 "
            f"masters (--dtype {low} --master-weights) they are in {low}"
        )


def _name(target: object) -> str:
    """An operator without its namespace and overload."""
    return str(target).split(".")[-2].lstrip("_") if "." in str(target) else str(target)
