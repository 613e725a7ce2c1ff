"""Page of `merak plan`: the winner's pipeline and memory, and the frontier of time and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from merak.cli.page.axis import PAGE_WIDTH, Axis
from merak.cli.page.html import document, part, write_document
from merak.core.units import seconds, size

if TYPE_CHECKING:
    from merak.cli.plan.planned import Planned
    from merak.cli.plan.request import PlanRequest
    from merak.plan.price.price import Price

_WIDTH, _LEFT, _HEIGHT = 900, 90, 360


def write_page(path: Path, planned: Planned, request: PlanRequest) -> None:
    """Write the page of a search, which needs nothing from elsewhere.

    Args:
        path: of the page.
        planned: the outcome.
        request: what was asked.

    Raises:
        CommandError: the page cannot be written.
    """
    write_document(path, _page(planned, request))


def _page(planned: Planned, request: PlanRequest) -> str:
    from merak.plan.price.step import simulated_pipeline
    from merak.plan.search.explain import describe
    from merak.schedule.render.svg import fitting_width, render_svg
    from merak.schedule.simulator.timeline import simulated_timeline

    plans = planned.ranking.plans
    best = plans[0]
    simulation = simulated_pipeline(planned.workload, planned.cluster, best.candidate)
    title = f"{request.model} on {planned.cluster_name}"
    priced = (*plans, *planned.ranking.behind, *planned.ranking.fits_nowhere)
    timeline = replace(
        simulated_timeline(simulation),
        subtitle=f"{seconds(simulation.makespan)}, bubble {simulation.bubble_fraction:.1%}",
        unit=" s",
    )
    width = fitting_width([timeline], PAGE_WIDTH)
    body = part(
        "plan",
        title=f"{title}: {describe(best.candidate)}",
        best=best,
        head=("plan", "step", "compute", "bubble", "communication", "optimizer", "memory"),
        rows=[_row(own) for own in plans],
        pipeline=render_svg([timeline], width, themed=True),
        memory=memory_svg(best),
        frontier=frontier_svg(priced),
    )
    return document(title, [body])


def _row(own: Price) -> tuple[str, ...]:
    from merak.plan.search.explain import describe

    causes = (own.compute_s, own.bubble_s, own.exposed_communication_s, own.optimizer_s)
    times = map(seconds, (own.step_s, *causes))
    return (describe(own.candidate), *times, size(max(own.peak_memory_bytes)))


def memory_svg(price: Price) -> Markup:
    """Draw the peak memory of every pp rank beside its device's memory.

    Args:
        price: of the plan.
    """
    known = [most for most in price.device_bytes if most < float("inf")]
    scale = (_WIDTH - _LEFT - 10) / max((*price.peak_memory_bytes, *known))
    rows = []
    for peak, most in zip(price.peak_memory_bytes, price.device_bytes, strict=True):
        is_known = most < float("inf")
        rows.append(
            {
                "width": peak * scale,
                "fits": peak <= most,
                "text": f"{size(peak)} of {size(int(most))}" if is_known else size(peak),
                "end": _LEFT + most * scale if is_known else None,
            }
        )
    return part("memory", rows=rows, left=_LEFT, width=_WIDTH)


def frontier_svg(prices: Sequence[Price]) -> Markup:
    """Draw plans by time and memory; those that no other beats in both are joined.

    Args:
        prices: of all plans to draw.
    """
    from merak.plan.search.explain import describe

    points = sorted(
        ((own.step_s, max(own.peak_memory_bytes), own) for own in prices), key=lambda p: p[:2]
    )
    across = Axis.over([step_s for step_s, _, _ in points], _LEFT, _WIDTH - 40, room=0.05)
    up = Axis.over([float(peak) for _, peak, _ in points], _HEIGHT - 50, 16, room=0.05)
    plans, joined, least = [], [], float("inf")
    for step_s, peak, own in points:
        x, y = across.place(step_s), up.place(peak)
        if own.fits and peak < least:
            least = peak
            joined.append((x, y))
        label = f"{describe(own.candidate)}: {seconds(step_s)}, {size(peak)}"
        plans.append((x, y, own.fits, label))
    return part(
        "frontier", across=across, up=up, width=_WIDTH, height=_HEIGHT, plans=plans, joined=joined
    )
