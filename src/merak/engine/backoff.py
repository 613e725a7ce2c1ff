"""After a step that ran out of memory: a plan that keeps fewer activations, the same on all ranks.

The estimate that the plan rests on does not see what a kernel takes inside, what fragments of the
allocator lose, and what other programs take of the device. So a position that ran out gets a
smaller budget, and what it keeps is chosen again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

import torch.distributed as dist

from merak.core.errors import PlanError
from merak.engine.forecast import Forecast
from merak.engine.plans import Plans
from merak.engine.program import Program
from merak.engine.programs import Programs
from merak.engine.recompute import Times, gigabytes, pp_that_fits
from merak.plan.recompute import recomputing_stages

_SHARE_LEFT = 0.9
"""Of the peak with which a position ran out of memory, what it may hold next."""

_MOST_WORDS = 160

logger = logging.getLogger(__name__)


class Backoff:
    """Gives up kept activations, step by step, where memory runs out.

    Args:
        forecast: the job as it was laid out.
        times: of the segments.
        programs: what this rank runs.
    """

    def __init__(self, forecast: Forecast, times: Times, programs: Programs) -> None:
        self._forecast = forecast
        self._times = times
        self._programs = programs

    def keep_less(self, step: int, reasons: Mapping[int, str]) -> tuple[Plans, Program]:
        """Let some segments recompute that kept their activations; called alike on every rank.

        Args:
            step: the job's step that ran out of memory.
            reasons: by pipeline position that did, the words of the error.

        Returns:
            The plans to go on with, and the program of an ordinary microbatch.

        Raises:
            PlanError: everything recomputes already where memory ran out.
        """
        mesh, layout = self._forecast.mesh, self._forecast.layout
        decided: list[tuple[frozenset[int], str | None]] = [(frozenset(), None)]
        if mesh.rank == 0:
            try:
                decided = [(self._less(step, reasons), None)]
            except PlanError as error:
                decided = [(frozenset(), str(error))]
        if mesh.device_mesh is not None:
            dist.broadcast_object_list(decided, src=0)
        kept, problem = decided[0]
        if problem is not None:
            raise PlanError(problem)
        if mesh.rank == 0:
            self._say(step, reasons, kept)
        plans = layout.plans.recomputing(recomputing_stages(layout.partition, kept))
        self._forecast = replace(self._forecast, layout=replace(layout, plans=plans, kept=kept))
        self._programs.keep(kept)
        return plans, self._programs.base

    def _less(self, step: int, reasons: Mapping[int, str]) -> frozenset[int]:
        forecast = self._forecast
        schedule, before = forecast.layout.schedule, forecast.kept
        kept = before
        for rank, reason in sorted(reasons.items()):
            own = frozenset(forecast.segments_of(rank)) - forecast.untrained
            held = before & own
            if not held:
                raise PlanError(self._hopeless(step, rank, reason))
            budget = forecast.ranks(schedule, before)[rank].peak.total_bytes
            left = held
            while not left < held:
                budget = int(_SHARE_LEFT * budget)
                # What another position has to give up on a stage of both, this one may as well.
                left = forecast.fill_one(rank, schedule, self._times(), budget) & held
            kept = kept - (own - left)
        return kept

    def _hopeless(self, step: int, rank: int, reason: str) -> str:
        forecast = self._forecast
        peak = forecast.ranks(forecast.layout.schedule, forecast.kept)[rank].peak
        needed = peak.total_bytes
        pp = pp_that_fits(forecast, int(_SHARE_LEFT * needed), self._times)
        fix = f"use pp={pp} or" if pp else "use"
        return (
            f"step {step} ran out of memory on pipeline position {rank} ({_first(reason)}), where "
            f"every segment recomputes and {gigabytes(needed)} were foreseen at {peak.at}; {fix} a "
            "larger tp or a smaller microbatch."
        )

    def _say(self, step: int, reasons: Mapping[int, str], kept: frozenset[int]) -> None:
        forecast = self._forecast
        for rank, reason in sorted(reasons.items()):
            own = frozenset(forecast.segments_of(rank))
            logger.warning(
                "step %d ran out of memory on pipeline position %d (%s); it runs again with the "
                "activations of %d of its %d segments kept, and no longer of %d.",
                step,
                rank,
                _first(reason),
                len(own & kept),
                len(own),
                len(own & forecast.kept),
            )


def _first(reason: str) -> str:
    """The beginning of an error's words."""
    line = " ".join(reason.split())
    return line if len(line) <= _MOST_WORDS else line[:_MOST_WORDS] + "…"
