"""Evaluation: a forward-only schedule, without randomness or gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from merak.core.tensor_meta import Signature
from merak.engine.stage import Microbatch
from merak.engine.state import EngineState
from merak.engine.step.schedule_run import ScheduleRun
from merak.engine.step.step_checks import microbatch_counts
from merak.engine.tensors_by_name import TensorDict
from merak.graph.program.program import Program
from merak.plan.memory.unshards import SegmentUnshard
from merak.plan.step_plans import StepPlan
from merak.schedule.builders.forward_only import forward_only
from merak.schedule.ir import Action
from merak.schedule.lower import lower
from merak.schedule.steps import Compute


@lru_cache(maxsize=64)
def evaluation_plan(
    stage_ranks: tuple[int, ...], num_ranks: int, num_microbatches: int
) -> StepPlan:
    """The forward-only schedule of an evaluation, and every rank's steps of it.

    Args:
        stage_ranks: the pp rank of each stage in the first pipe, which evaluates.
        num_ranks: pipeline degree.
        num_microbatches: microbatches of a replica.
    """
    schedule = forward_only(stage_ranks, num_ranks, num_microbatches)
    return StepPlan(schedule, lower(schedule))


class EvaluationRun(ScheduleRun):
    """Forward of some microbatches through all stages.

    Args:
        state: of this rank's engine.
        programs: of this replica's microbatches, by number; at least one.
        microbatch: makes the microbatch of a number, when its first action begins.
    """

    def __init__(
        self,
        state: EngineState,
        programs: Sequence[Program],
        microbatch: Callable[[int], Microbatch],
    ) -> None:
        plan = evaluation_plan(state.stage_rank, state.mesh.pp, len(programs))
        super().__init__(state, plan, programs)
        self.outputs: list[TensorDict] = [{} for _ in programs]
        self._make = microbatch
        # Of the microbatches that are under way: columns and derived values take memory.
        self._microbatches: dict[int, Microbatch] = {}
        own = plan.schedule.actions[self.rank]
        self._last_of = {action.microbatch: action for action in own}
        self._left = list(plan.steps[self.rank])

    def run_until(self, number: int) -> None:
        """Run this rank's steps, as far as they have not run, up to those of a microbatch."""
        due = [step for step in self._left if _microbatch(step) <= number]
        # No receive is posted before its sender may have come to the send.
        self._left = [step for step in self._left if _microbatch(step) > number]
        self.run_steps(due)

    def pop_outputs(self, number: int) -> TensorDict:
        """The model's outputs of a microbatch that this rank has made, which it then forgets."""
        made, self.outputs[number] = self.outputs[number], {}
        return made

    def forward(self, action: Action) -> None:
        """Run a stage on a microbatch, and collect the model's outputs made there."""
        number = action.microbatch
        with self._state.progress.action(action):
            if number not in self._microbatches:
                self._microbatches[number] = self._make(number)
            microbatch = self._microbatches[number]
            received = self.received(action, microbatch)
            made = self._state.stages[action.stage].evaluate(microbatch, received)
            self.give(action, made)
        results = self._programs[number].stages[action.stage].results
        self.outputs[number] |= {name: made[value] for name, value in results.items()}
        if self._last_of[number] is action:
            del self._microbatches[number]


def _microbatch(step: Any) -> int:
    """The microbatch of a step of an evaluation."""
    number: int = step.action.microbatch if isinstance(step, Compute) else step.microbatch
    return number


def _num_ahead(state: EngineState) -> int:
    """Microbatches that this rank runs ahead of the last stage, to keep it busy.

    As many as there are stages behind it, where each rank has one; else those of a rank wait for
    one another.
    """
    in_order = tuple(state.stage_rank) == tuple(range(state.mesh.pp))
    return state.mesh.pp - 1 - state.mesh.pp_rank if in_order else 0


def evaluate(
    state: EngineState,
    programs: Sequence[Program],
    most: int,
    microbatch: Callable[[int], Microbatch],
) -> Iterator[TensorDict]:
    """Evaluate this replica's microbatches, one after another; all ranks call it together.

    The last stage computes a microbatch when the outputs of the one before have been taken, so that
    it holds those of one; with FSDP all of them.

    Args:
        state: of this rank's engine.
        programs: of this replica's microbatches, by number; may be none.
        most: the most microbatches that a replica has. FSDP gathers parameters on all replicas
            together, so those with fewer take part for the others.
        microbatch: makes the microbatch of a number.

    Yields:
        Per microbatch the model's outputs by name that this rank's stages make.
    """
    if state.fsdp is not None:
        made = _evaluate_at_once(state, programs, most, microbatch)
        while made:
            yield made.pop(0)
    elif programs:
        run, ahead = EvaluationRun(state, programs, microbatch), _num_ahead(state)
        for number in range(len(programs)):
            run.run_until(number + ahead)
            yield run.pop_outputs(number)
    state.stage_io.finish()


def _evaluate_at_once(
    state: EngineState,
    programs: Sequence[Program],
    most: int,
    microbatch: Callable[[int], Microbatch],
) -> list[TensorDict]:
    """Evaluate this replica's microbatches while others run theirs; as `evaluate`."""
    rest: list[SegmentUnshard] = []
    assert state.fsdp is not None
    if most:
        # Of what others have alone, all is known that matters: they are microbatches as well.
        some = programs[-1] if programs else state.base
        padded = [*programs, *[some] * (most - len(programs))]
        order = list(EvaluationRun(state, padded, microbatch).unshards())
        state.fsdp.start(order)
        own = len(list(EvaluationRun(state, programs, microbatch).unshards())) if programs else 0
        rest = order[own:]
    outputs: list[TensorDict] = []
    if programs:
        run = EvaluationRun(state, programs, microbatch)
        run.run_plan()
        outputs = run.outputs
    for unshard in rest:
        state.fsdp.begin(unshard.segment.segment.parameters)
        state.fsdp.end(unshard.segment.segment.parameters)
    return outputs


def pad_microbatches(
    state: EngineState,
    signatures: Sequence[Signature],
    batches: Sequence[Mapping[str, torch.Tensor]],
) -> tuple[Sequence[Signature], Sequence[Mapping[str, torch.Tensor]]]:
    """Microbatches and further ones whose results nobody reads, as many as any replica has.

    This replica computes the rows that others send to its experts while it runs a microbatch.

    Args:
        state: of this rank's engine.
        signatures: of this replica's microbatches.
        batches: their columns.
    """
    missing = microbatch_counts(state, len(signatures))[0] - len(signatures)
    if not missing:
        return signatures, batches
    if signatures:
        signature, batch = signatures[-1], batches[-1]
    else:
        signature, device = state.program_for.base_signature, state.mesh.device
        batch = {n: torch.zeros(m.shape, dtype=m.dtype, device=device) for n, m in signature}
    return [*signatures, *[signature] * missing], [*batches, *[batch] * missing]
