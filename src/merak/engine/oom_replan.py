"""After a step that ran out of memory: a plan that keeps fewer activations, the same on all ranks.

The estimate that the plan rests on does not see what a kernel takes inside, what fragments of the
allocator lose, and what other programs take of the device. So a position that ran out gets a
smaller budget, and what it keeps is chosen again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from merak.core.errors import PlanError
from merak.core.health.status import phase, waiting_for_first
from merak.core.tensor_meta import Signature
from merak.engine.local_programs import ProgramCache
from merak.engine.state import EngineState
from merak.engine.tensors_by_name import TensorDict
from merak.graph.program.program import Program
from merak.plan.activations.decide import Profile, dear_operators, gigabytes, pp_that_fits
from merak.plan.activations.forecast import Forecast
from merak.plan.activations.offload_spec import Times
from merak.plan.activations.recompute import recomputing_stages
from merak.plan.cost.selective_ops import Dear
from merak.plan.layout import Layout
from merak.plan.step_plans import StepPlans

_BUDGET_FRACTION = 0.9
"""Of the peak with which a position ran out of memory, what it may hold next."""

_MAX_CHARACTERS = 160

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _FewerSaved:
    """What is still kept, as `Layout` has it; or why there is nothing left to give up."""

    kept: frozenset[int] = frozenset()
    partly: Mapping[int, Dear] = field(default_factory=dict)
    problem: str | None = None


class OomReplanner:
    """Gives up kept activations, step by step, where memory runs out.

    Args:
        forecast: the job as it was laid out.
        times: of the segments.
        profile: of the devices.
        programs: what this rank runs.
    """

    def __init__(
        self, forecast: Forecast, times: Times, profile: Profile, programs: ProgramCache
    ) -> None:
        self._forecast = forecast
        self._times = times
        self._profile = profile
        self._programs = programs

    def save_fewer(self, step: int, reasons: Mapping[int, str]) -> tuple[StepPlans, Program]:
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
        decided: list[_FewerSaved] = [_FewerSaved()]
        if mesh.rank == 0:
            try:
                with phase("choosing what to keep less of"):
                    decided = [self._fewer_saved(step, reasons)]
            except PlanError as error:
                decided = [_FewerSaved(problem=str(error))]
        if mesh.device_mesh is not None:
            with waiting_for_first("what to keep less of"):
                dist.broadcast_object_list(decided, src=0)
        fewer = decided[0]
        if fewer.problem is not None:
            raise PlanError(fewer.problem)
        plans = layout.plans.recomputing(recomputing_stages(layout.partition, fewer.kept))
        layout = replace(
            layout,
            plans=plans,
            kept=fewer.kept,
            partly=fewer.partly,
            offloaded=layout.offloaded & fewer.kept,
        )
        if mesh.rank == 0:
            self._log(step, reasons, layout)
        self._forecast = replace(self._forecast, layout=layout)
        self._programs.set_activation_choices(layout)
        return plans, self._programs.base

    def _fewer_saved(self, step: int, reasons: Mapping[int, str]) -> _FewerSaved:
        forecast = self._forecast
        dear = {**dear_operators(forecast, self._profile), **forecast.layout.partly}
        kept, partly = forecast.kept, frozenset(forecast.layout.partly)
        for rank, reason in sorted(reasons.items()):
            own = frozenset(forecast.segments_of(rank)) - forecast.untrained
            if not own & (kept | partly):
                raise PlanError(self._message(step, rank, reason))
            whole, some = self._choose_fewer(rank, dear)
            # What another position has to give up on a stage of both, this one may as well.
            kept -= own - whole
            partly = (partly - own) | (some - kept)
        return _FewerSaved(kept, {index: dear[index] for index in partly - kept})

    def _choose_fewer(
        self, rank: int, dear: Mapping[int, Dear]
    ) -> tuple[frozenset[int], frozenset[int]]:
        """The best choice for a position that needs less than the present one."""
        forecast = self._forecast
        schedule = forecast.layout.schedule
        most = forecast.ranks(schedule, forecast.kept)[rank].peak.total_bytes
        budget = int(_BUDGET_FRACTION * most)
        while True:
            whole, some = forecast.fill_one(
                rank, schedule, self._times(), budget, dear, self._offloaded
            )
            partly = {index: dear[index] for index in some}
            needed = forecast.ranks(schedule, whole | forecast.untrained, partly)[rank].peak
            if needed.total_bytes < most or not whole | some:
                return whole, some
            budget = int(_BUDGET_FRACTION * budget)

    def _offloaded(self, kept: frozenset[int]) -> frozenset[int]:
        """Of segments that keep their activations, those that do so in host memory."""
        return kept & self._forecast.layout.offloaded

    def _message(self, step: int, rank: int, reason: str) -> str:
        forecast = self._forecast
        peak = forecast.ranks(forecast.layout.schedule, forecast.kept)[rank].peak
        needed = peak.total_bytes
        pp = pp_that_fits(forecast, int(_BUDGET_FRACTION * needed), self._times)
        fix = f"use pp={pp} or" if pp else "use"
        return (
            f"step {step} ran out of memory on pp rank {rank} ({_beginning(reason)}), where "
            f"every segment recomputes and {gigabytes(needed)} were foreseen at {peak.at}; {fix} a "
            "larger tp or a smaller microbatch."
        )

    def _log(self, step: int, reasons: Mapping[int, str], layout: Layout) -> None:
        before = self._forecast
        for rank, reason in sorted(reasons.items()):
            own = frozenset(before.segments_of(rank))
            some = len(own & frozenset(layout.partly))
            logger.warning(
                "step %d ran out of memory on pp rank %d (%s); it runs again with the "
                "activations of %d of its %d segments kept, and no longer of %d%s.",
                step,
                rank,
                _beginning(reason),
                len(own & layout.kept),
                len(own),
                len(own & before.kept),
                f", and of {some} a part" if some else "",
            )


def _beginning(reason: str) -> str:
    """The beginning of an error's words."""
    line = " ".join(reason.split())
    return line if len(line) <= _MAX_CHARACTERS else line[:_MAX_CHARACTERS] + "…"


def written_buffers(state: EngineState, signatures: Sequence[Signature]) -> TensorDict:
    """Copies of the buffers that a step writes; none where a step cannot be aborted.

    Args:
        state: of this rank's engine.
        signatures: of the step's microbatches.
    """
    if not state.oom_guard.is_armed:
        return {}
    names = {
        name
        for signature in set(signatures)
        for stage in state.program_for(signature, True).stages.values()
        for segment in stage.segments
        for name in segment.written
    }
    return {name: buffer.clone() for name, buffer in state.buffers.items() if name in names}


@torch.no_grad()
def restore(state: EngineState, written: TensorDict) -> None:
    """Undo a step that was aborted: its writes into buffers, and its gradients."""
    for name, before in written.items():
        state.buffers[name].copy_(before)
    state.optimizer_params.clear_gradients()


def replan(state: EngineState, step: int, reasons: Mapping[int, str]) -> EngineState:
    """An engine's state with a plan that saves fewer activations; all ranks call it together.

    Args:
        state: of this rank's engine.
        step: the step that ran out of memory.
        reasons: by pp rank that did, the message of the error.
    """
    assert state.save_fewer is not None
    plans, base = state.save_fewer(step, reasons)
    return replace(state, plan_for=plans, base=base)
