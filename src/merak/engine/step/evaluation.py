"""Evaluation: a forward-only schedule, without randomness or gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from merak.engine.stage import Microbatch
from merak.engine.state import EngineState
from merak.engine.step.schedule_run import ScheduleRun
from merak.engine.tensors_by_name import TensorDict
from merak.graph.program.program import Program
from merak.plan.step_plans import StepPlan
from merak.schedule.builders.forward_only import forward_only
from merak.schedule.ir import Action
from merak.schedule.lower import lower


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

    def forward(self, action: Action) -> None:
        """Run a stage on a microbatch, and collect the model's outputs made there."""
        number = action.microbatch
        with self._state.progress.action(action):
            if number not in self._microbatches:
                self._microbatches[number] = self._make(number)
            made = self.run_forward(action, self._microbatches[number])
        results = self._programs[number].stages[action.stage].results
        self.outputs[number] |= {name: made[value] for name, value in results.items()}
        if self._last_of[number] is action:
            del self._microbatches[number]

    def run_stage(self, action: Action, microbatch: Microbatch, received: TensorDict) -> TensorDict:
        """Run a stage without a backward to come."""
        return self._state.stages[action.stage].evaluate(microbatch, received)


def evaluate(
    state: EngineState,
    programs: Sequence[Program],
    most: int,
    microbatch: Callable[[int], Microbatch],
) -> list[TensorDict]:
    """Evaluate this replica's microbatches; all ranks call it together.

    Args:
        state: of this rank's engine.
        programs: of this replica's microbatches, by number; may be none.
        most: the most microbatches that a replica has. FSDP gathers parameters on all replicas
            together, so those with fewer take part for the others.
        microbatch: makes the microbatch of a number.

    Returns:
        Per microbatch the model's outputs by name that this rank's stages make.
    """
    rest: list[tuple[str, ...]] = []
    if state.fsdp is not None and most:
        # Of what others have alone, all is known that matters: they are microbatches as well.
        some = programs[-1] if programs else state.base
        padded = [*programs, *[some] * (most - len(programs))]
        order = list(EvaluationRun(state, padded, microbatch).unshards())
        state.fsdp.start(order)
        own = len(list(EvaluationRun(state, programs, microbatch).unshards())) if programs else 0
        rest = [names for names, _ in order[own:]]
    outputs: list[TensorDict] = []
    if programs:
        run = EvaluationRun(state, programs, microbatch)
        run.run_plan()
        outputs = run.outputs
    state.stage_io.finish()
    for names in rest:
        assert state.fsdp is not None
        state.fsdp.begin(names)
        state.fsdp.end(names)
    return outputs
