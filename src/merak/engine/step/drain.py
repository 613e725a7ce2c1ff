"""Draining an aborted step: this rank performs the communication of its rest, and no computation.

What it sends and receives is in the plan, and its sizes are in the program: it sends zeros. The
collectives of tensor parallelism are inside the segments alone; so these run on, on fake tensors,
and only their collectives are carried out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from merak.core.mesh import Mesh
from merak.core.tensor_meta import TensorMeta
from merak.engine.comm.stage_io import StageIO
from merak.engine.segments.weight_gradients import WeightGradients
from merak.engine.stage import Microbatch, Stage
from merak.engine.tensors_by_name import ParamLeaves, TensorDict
from merak.engine.weight_versions import LiveWeights
from merak.engine.zero.fsdp import FsdpParameters
from merak.graph.ir.ir import Kind as ValueKind
from merak.graph.program.program import Program, SegmentProgram
from merak.graph.trace.branches.flags import is_condition
from merak.plan.memory.unshards import SegmentUnshard, unshards_of
from merak.schedule.ir import BACKWARD_KINDS, GRADIENT_KINDS, Action, Kind, Schedule
from merak.schedule.steps import Payload, Receive

SegmentDone = Callable[[SegmentProgram], None]


def num_tp_collectives(mesh: Mesh) -> int:
    """The number of collectives that this rank has begun with its tensor parallel peers."""
    group = mesh.group("tp")
    # torch's stubs leave it out; every backend counts.
    return 0 if group is None else int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]


class DrainStep:
    """Performs the communication of actions, without their computation.

    Args:
        mesh: the grid of ranks.
        stages: this rank's.
        exchange: activations and gradients between stages.
        schedule: of the step.
        microbatches: of the step.
        fsdp: the parameters that are sharded over replicas; None for none.
    """

    def __init__(  # one argument for each thing that communicates
        self,
        mesh: Mesh,
        stages: Mapping[int, Stage],
        exchange: StageIO,
        schedule: Schedule,
        microbatches: Sequence[Microbatch],
        fsdp: FsdpParameters | None = None,
    ) -> None:
        self._mesh = mesh
        self._exchange = exchange
        self._schedule = schedule
        self._microbatches = microbatches
        self._fsdp = None if fsdp is None else DrainedParameters(fsdp)
        self._fake_stages: FakeStages | None = None
        if mesh.group("tp") is not None:
            self._fake_stages = FakeStages(mesh.device, stages, schedule, microbatches, self._fsdp)

    def fast_forward(self, before: Sequence[Action]) -> None:
        """Bring the fake stages to where the rank is in the step.

        Args:
            before: the actions that the rank has performed, in order.
        """
        if self._fake_stages is not None:
            done = [(a.stage, a.microbatch) for a in before if a.kind in GRADIENT_KINDS]
            for action in before:
                if (action.stage, action.microbatch) not in done:
                    self._fake_stages.perform(action, lambda segment: None, None)

    def perform(self, action: Action, segment_done: SegmentDone, num_done: int = 0) -> None:
        """Perform the communication of an action, or the rest of it.

        Args:
            action: what to perform.
            segment_done: called after each segment of a backward, last segment first.
            num_done: collectives of the action over tp that the rank has begun already.
        """
        stage, number = action.stage, action.microbatch
        goes_back = action.kind in GRADIENT_KINDS
        if action.kind is Kind.FORWARD:
            self._discard(Payload.ACTIVATION, stage - 1, number)
        elif goes_back:
            self._discard(Payload.GRADIENT, stage + 1, number)
        if self._fake_stages is not None and action.kind is not Kind.WEIGHT_GRADIENT:
            self._fake_stages.perform(action, segment_done, num_done)
        else:
            self._join_collectives(action, segment_done)
        if action.kind is Kind.FORWARD and stage + 1 < self._schedule.num_stages:
            self._give_zeros(Payload.ACTIVATION, action, self._program(number).stages[stage].sent)
        elif goes_back and stage > 0:
            received = self._program(number).stages[stage].received
            self._give_zeros(Payload.GRADIENT, action, self._program(number).gradients_of(received))

    def _join_collectives(self, action: Action, segment_done: SegmentDone) -> None:
        """Join the replicas' collectives, segment by segment, and report every backward."""
        program = self._program(action.microbatch).stages[action.stage]
        recomputes = self._schedule.recompute[action.stage]
        unshards = {
            own.segment.segment.index: own for own in unshards_of(action.kind, program, recomputes)
        }
        goes_back = action.kind in BACKWARD_KINDS
        for segment in reversed(program.segments) if goes_back else program.segments:
            if self._fsdp is not None and segment.segment.index in unshards:
                self._fsdp.join(unshards[segment.segment.index])
            if action.kind in GRADIENT_KINDS:
                segment_done(segment)

    def _program(self, number: int) -> Program:
        return self._microbatches[number].program

    def _discard(self, payload: Payload, producer: int, number: int) -> None:
        if 0 <= producer < self._schedule.num_stages:
            peer = self._schedule.rank_of(producer, number)
            self._exchange.discard(Receive(payload, producer, number, peer), self._program(number))

    def _give_zeros(self, payload: Payload, action: Action, names: Sequence[str]) -> None:
        metas = {name: self._program(action.microbatch).values[name] for name in names}
        zeros = {
            name: torch.zeros(meta.shape, dtype=meta.dtype, device=self._mesh.device)
            for name, meta in metas.items()
        }
        self._exchange.give(payload, action.stage, action.microbatch, zeros)


class DrainedParameters:
    """FSDP parameters whose collectives this rank joins for its replicas alone.

    Args:
        fsdp: the parameters.
    """

    def __init__(self, fsdp: FsdpParameters) -> None:
        self._fsdp = fsdp
        self.participates = True
        fsdp.abort_step()

    def begin(self, names: Sequence[str]) -> None:
        """Join the all-gathers of parameters that nobody reads here."""
        if self.participates:
            with _disable_current_modes():
                self._fsdp.begin(names, drained=True)

    def join(self, unshard: SegmentUnshard) -> None:
        """Join all collectives of an unshard."""
        names = unshard.segment.segment.parameters
        if unshard.gathers:
            self.begin(names)
            self.end(names)
        else:
            self.reduce(names)

    def weights(self, names: Sequence[str], others: ParamLeaves) -> ParamLeaves:
        """Fake parameters, of which none is sharded."""
        return others

    def end(self, names: Sequence[str]) -> None:
        """Join the reduce-scatters of gradients, with zeros."""
        if self.participates:
            with _disable_current_modes():
                self._fsdp.end(names, drained=True)

    def reduce(self, names: Sequence[str]) -> None:
        """Join the reduce-scatters of gradients that were left for later, with zeros."""
        self._fsdp.reduce(names, drained=True)


class FakeStages:
    """A rank's stages on fake tensors, whose collectives are carried out.

    Args:
        device: of the fake tensors.
        stages: the rank's own.
        schedule: of the step.
        microbatches: of the step.
        fsdp: joins the collectives of sharded parameters; None for none.
    """

    def __init__(
        self,
        device: torch.device,
        stages: Mapping[int, Stage],
        schedule: Schedule,
        microbatches: Sequence[Microbatch],
        fsdp: DrainedParameters | None,
    ) -> None:
        self._device = device
        self._fsdp = fsdp
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._collectives = _Collectives(device)
        self._schedule = schedule
        self._stages = {number: self._fake_stage(stage) for number, stage in stages.items()}
        self._microbatches = [self._microbatch(microbatch) for microbatch in microbatches]

    def perform(self, action: Action, segment_done: SegmentDone, num_done: int | None) -> None:
        """Perform an action on fake tensors.

        Args:
            action: what to perform.
            segment_done: as of `DrainStep.perform`.
            num_done: how many of its collectives are skipped at first; None for all of them.
        """

        def done(segment: SegmentProgram) -> None:
            with _disable_current_modes():
                segment_done(segment)

        stage, number = self._stages[action.stage], action.microbatch
        microbatch = self._microbatches[number]
        program = microbatch.program.stages[action.stage]
        self._collectives.num_skipped = num_done
        if self._fsdp is not None:
            self._fsdp.participates = num_done is not None
        with self._mode, self._collectives:
            if action.kind is Kind.FORWARD:
                keep = not self._schedule.recompute[action.stage]
                stage.forward(number, microbatch, self._values(program.received, microbatch), keep)
            elif action.kind is Kind.RECOMPUTE:
                stage.recompute(number, microbatch)
            elif action.kind in GRADIENT_KINDS:
                names = microbatch.program.gradients_of(program.sent)
                gradients = self._values(names, microbatch)
                loss = microbatch.program.loss
                if loss in program.results.values():
                    gradients |= self._values([str(loss)], microbatch)
                defers = action.kind is Kind.INPUT_GRADIENT
                stage.backward(number, microbatch, gradients, done, defers=defers)

    def _values(self, names: Iterable[str], microbatch: Microbatch) -> TensorDict:
        return {name: self._fake(microbatch.program.values[name]) for name in names}

    def _fake(self, like: TensorMeta | torch.Tensor) -> torch.Tensor:
        with self._mode:
            return torch.empty(tuple(like.shape), dtype=like.dtype, device=self._device)

    def _fake_stage(self, stage: Stage) -> Stage:
        weights = {}
        with self._mode:
            for name, real in stage.weights.live.items():
                weights[name] = torch.nn.Parameter(self._fake(real), real.requires_grad)
        buffers = {name: self._fake(real) for name, real in stage.buffers.items()}
        own = LiveWeights(weights, ())
        fsdp = self._fsdp
        return Stage(stage.index, own, buffers, WeightGradients(), self._device, fsdp)

    def _microbatch(self, real: Microbatch) -> Microbatch:
        columns: TensorDict = {}
        batch_only: TensorDict = {}
        for stage in real.program.stages.values():
            for program in stage.segments:
                for node in program.segment.graph.find_nodes(op="placeholder"):
                    kind, name = node.meta["kind"], node.meta["name"]
                    if kind in (ValueKind.COLUMN, ValueKind.BATCH_ONLY):
                        into = columns if kind is ValueKind.COLUMN else batch_only
                        into[name] = self._fake(node.meta["tensor"])
                        if is_condition(node):  # of which collectives there are
                            into[name] = real.batch_only[name]
        return Microbatch(real.program, columns, batch_only, real.random_key)


class _Collectives(TorchDispatchMode):
    """Carries out the collectives of fake tensors, with zeros in their place.

    Args:
        device: where the zeros are.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_skipped: int | None = 0
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator; a collective on zeros, or not at all where it is skipped."""
        if func.namespace != "c10d":
            return func(*args, **(kwargs or {}))
        if self.num_skipped is None or self.num_skipped > 0:
            if self.num_skipped is not None:
                self.num_skipped -= 1
            work: Any = FakeWork().boxed()
            return (args[0], work) if len(func._schema.returns) == 2 else work
        with _disable_current_modes():
            result = func(*tree_map(self._zeros, args), **(kwargs or {}))
        return (args[0], result[1]) if len(func._schema.returns) == 2 else result

    def _zeros(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.zeros(value.shape, dtype=value.dtype, device=self._device)
