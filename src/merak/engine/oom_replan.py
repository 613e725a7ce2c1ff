"""Replanning after a step that ran out of memory: fewer saved activations, the same on all ranks.

The estimate that the plan rests on counts tensors; what else is on a device is known roughly
(`merak.plan.memory.non_tensor`), and other programs on it are not. So a pp rank that ran out of
memory gets a smaller budget, for which its saved activations are chosen again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from merak.core.errors import PlanError
from merak.core.health.status import phase
from merak.core.rank0 import decide_on_rank0, warn_on_rank0
from merak.core.tensor_meta import Signature
from merak.core.units import size
from merak.engine.health.oom import outside_tensors
from merak.engine.local_programs import ProgramCache
from merak.engine.state import EngineState
from merak.engine.tensors_by_name import TensorDict
from merak.graph.program.program import Program
from merak.plan.activation_policy import ActivationPolicy
from merak.plan.activations.decide import Profile, find_fitting_pp, selective_operators
from merak.plan.activations.forecast import Forecast
from merak.plan.activations.offload_spec import Times
from merak.plan.activations.recompute import recomputing_stages
from merak.plan.cost.selective_ops import SelectiveOps
from merak.plan.layout import Layout
from merak.plan.step_plans import StepPlans

_BUDGET_FRACTION = 0.9
"""The next budget of a pp rank, as a part of the peak with which it ran out of memory."""

_MAX_CHARACTERS = 160

logger = logging.getLogger(__name__)


class OomReplanner:
    """Saves fewer activations where a step ran out of memory.

    Args:
        forecast: the job as it was laid out.
        times: of the segments.
        profile: of the devices.
        programs: of this rank.
    """

    def __init__(
        self, forecast: Forecast, times: Times, profile: Profile, programs: ProgramCache
    ) -> None:
        self._forecast = forecast
        self._times = times
        self._profile = profile
        self._programs = programs

    def save_fewer(self, step: int, reasons: Mapping[int, str]) -> tuple[StepPlans, Program]:
        """Recompute some segments whose activations were saved; all ranks call it together.

        Args:
            step: the job's step that ran out of memory.
            reasons: by pp rank that did, the message of the error.

        Returns:
            The plans to go on with, and the program of an ordinary microbatch.

        Raises:
            PlanError: everything recomputes already where memory ran out.
        """
        layout = self._forecast.layout
        what = "the activations to save after memory ran out"
        policy = decide_on_rank0(self._forecast.mesh, what, lambda: self._policy(step, reasons))
        plans = layout.plans.recomputing(recomputing_stages(layout.partition, policy.saved))
        layout = replace(layout, plans=plans, activations=policy)
        self._log(step, reasons, layout)
        self._forecast = replace(self._forecast, layout=layout)
        self._programs.set_activation_choices(layout)
        return plans, self._programs.base

    def _policy(self, step: int, reasons: Mapping[int, str]) -> ActivationPolicy:
        forecast, policy = self._forecast, self._forecast.policy
        with phase("choosing which activations to save"):
            selective = {**selective_operators(forecast, self._profile), **policy.selective}
            saved, partly = policy.saved, frozenset(policy.selective)
            for rank, reason in sorted(reasons.items()):
                own = frozenset(forecast.segments_of(rank)) - forecast.untrained
                if not own & (saved | partly):
                    raise PlanError(self._nothing_left(step, rank, reason))
                whole, some = self._choose_fewer(rank, selective)
                # A stage that another pp rank holds as well recomputes there, too.
                saved -= own - whole
                partly = (partly - own) | (some - saved)
            some_ops = {index: selective[index] for index in partly - saved}
            return ActivationPolicy(saved, some_ops, policy.offloaded & saved)

    def _choose_fewer(
        self, rank: int, selective: Mapping[int, SelectiveOps]
    ) -> tuple[frozenset[int], frozenset[int]]:
        """The segments of a pp rank that save everything, or something, in less memory than now."""
        forecast = self._forecast
        schedule = forecast.layout.schedule
        most = forecast.ranks(schedule)[rank].peak.total_bytes
        budget = int(_BUDGET_FRACTION * most)
        times = forecast.timed(self._times(), self._profile())
        while True:
            whole, some = forecast.fill_rank(
                rank, schedule, times, budget, selective, self._offloaded
            )
            policy = ActivationPolicy(
                whole | forecast.untrained,
                {index: selective[index] for index in some},
                self._offloaded(whole),
            )
            needed = forecast.ranks(schedule, policy)[rank].peak
            if needed.total_bytes < most or not whole | some:
                return whole, some
            budget = int(_BUDGET_FRACTION * budget)

    def _offloaded(self, saved: frozenset[int]) -> frozenset[int]:
        """The segments whose saved activations are offloaded to host memory."""
        return saved & self._forecast.layout.activations.offloaded

    def _nothing_left(self, step: int, rank: int, reason: str) -> str:
        forecast = self._forecast
        peak = forecast.ranks(forecast.layout.schedule)[rank].peak
        needed = peak.total_bytes
        pp = find_fitting_pp(forecast, int(_BUDGET_FRACTION * needed), self._times)
        fix = f"use pp={pp} or" if pp else "use"
        return (
            f"step {step} ran out of memory on pp rank {rank} ({_beginning(reason)}), where "
            f"every segment recomputes and {size(needed, 2)} were foreseen at {peak.at}"
            f"{outside_tensors()}; {fix} a larger tp or a smaller microbatch."
        )

    def _log(self, step: int, reasons: Mapping[int, str], layout: Layout) -> None:
        before = self._forecast
        for rank, reason in sorted(reasons.items()):
            own = frozenset(before.segments_of(rank))
            some = len(own & frozenset(layout.activations.selective))
            warn_on_rank0(
                logger,
                "step %d ran out of memory on pp rank %d (%s); it runs again with the "
                "activations of %d of its %d segments saved, and no longer of %d%s.",
                step,
                rank,
                _beginning(reason),
                len(own & layout.activations.saved),
                len(own),
                len(own & before.saved),
                f", and of {some} a part" if some else "",
            )


def _beginning(reason: str) -> str:
    """The beginning of an error's words."""
    line = " ".join(reason.split())
    return line if len(line) <= _MAX_CHARACTERS else line[:_MAX_CHARACTERS] + "…"


def written_buffers(state: EngineState, signatures: Sequence[Signature]) -> TensorDict:
    """Copies of the buffers that a step writes, for one that is aborted or not finite.

    Args:
        state: of this rank's engine.
        signatures: of the step's microbatches.
    """
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
    """Undo a step that was aborted or not finite: what it wrote into buffers, its gradients."""
    for name, before in written.items():
        state.buffers[name].resize_as_(before).copy_(before)  # it may have grown in the step
    state.optimizer_params.clear_gradients()
    if state.reducer.compression is not None:
        state.reducer.compression.undo()


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
