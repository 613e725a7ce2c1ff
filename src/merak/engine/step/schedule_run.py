"""Runs of a schedule with tensors: this rank's steps, of training and evaluation alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from merak.engine.stage import Microbatch
from merak.engine.state import EngineState
from merak.engine.tensors_by_name import TensorDict
from merak.graph.program.program import Program
from merak.plan.memory.unshards import SegmentUnshard, unshards_of
from merak.plan.step_plans import StepPlan
from merak.schedule.interpreter import StepInterpreter
from merak.schedule.ir import Action
from merak.schedule.steps import Payload, Receive, Send


class ScheduleRun(StepInterpreter):
    """One run of a schedule on this rank: forwards, and the activations between stages.

    Args:
        state: of this rank's engine.
        plan: the schedule, and every rank's steps of it.
        programs: of this replica's microbatches, by number.
    """

    def __init__(self, state: EngineState, plan: StepPlan, programs: Sequence[Program]) -> None:
        super().__init__(plan.schedule, state.mesh.pp_rank)
        self._state = state
        self._plan = plan
        self._programs = programs

    def run_plan(self) -> None:
        """Run this rank's steps of the plan, in order."""
        self.run_steps(self._plan.steps[self.rank])

    def unshards(self) -> Iterator[SegmentUnshard]:
        """The order in which the run gathers FSDP parameters; see `unshards_of`."""
        for action in self.schedule.actions[self.rank]:
            program = self._programs[action.microbatch].stages[action.stage]
            yield from unshards_of(action.kind, program, self.schedule.recompute[action.stage])

    def send(self, step: Send) -> None:
        """Start to send what the action before has computed."""
        self._state.stage_io.send(step)

    def receive(self, step: Receive) -> None:
        """Post a receive, for an action to come."""
        self._state.stage_io.post(step, self._programs[step.microbatch])

    def received(self, action: Action, microbatch: Microbatch) -> TensorDict:
        """What the forward of a stage reads of the one before; waits for it."""
        if not microbatch.batch_only:
            self._state.microbatches.compute_batch_only(microbatch)
        return self.taken(Payload.ACTIVATION, action.stage - 1, action.microbatch)

    def give(self, action: Action, made: TensorDict) -> None:
        """Give to the next stage what the forward of one has made."""
        stage, number = action.stage, action.microbatch
        if stage + 1 < self.schedule.num_stages:
            sent = {name: made[name] for name in self._programs[number].stages[stage].sent}
            self._state.stage_io.give(Payload.ACTIVATION, stage, number, sent)

    def taken(self, payload: Payload, producer: int, number: int) -> TensorDict:
        """The activations or gradients that a neighbouring stage has given; waits for them."""
        if not 0 <= producer < self.schedule.num_stages:
            return {}
        source = Receive(payload, producer, number, self.schedule.rank_of(producer, number))
        values = self._state.stage_io.take(source, self._programs[number])
        self._state.progress.inputs_ready()
        return values
