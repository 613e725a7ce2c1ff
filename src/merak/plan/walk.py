"""A rank's steps, one after another, as changes of what it holds; see `merak.plan.ledger`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from merak.engine.program import Program, SegmentProgram
from merak.graph.ir import Kind as ValueKind
from merak.graph.ir import TensorMeta
from merak.plan.ledger import Ledger, Part, Window
from merak.plan.saved import SegmentMemory
from merak.schedule.ir import FINAL_KINDS, Action, Kind, Schedule
from merak.schedule.steps import Compute, Payload, Receive, ReduceGradients, Send, Step

Keys = dict[str, Hashable]
"""Values by name, and the storage each lies in; None for one that costs nothing."""


@dataclass(frozen=True, slots=True)
class SharedHere:
    """A parameter that several segments read, as one pipe sees it from this rank.

    Args:
        first: the first segment here that reads it.
        owned: whether this rank has the first segment of all, and so sums what the others send.
        num_holders: how many ranks of the pipe read it.
        open_sends: gradients of it that this rank may have sent and not yet seen taken.
    """

    first: int
    owned: bool
    num_holders: int
    open_sends: int = 0


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a rank's walk needs to know besides its steps.

    Args:
        rank: the pipeline position.
        schedule: the schedule, with the stages that recompute anything.
        program: the rank's stages, with the segments that keep their activations.
        memory: what each segment needs, by its number.
        derived_bytes: of the derived values of a microbatch.
        shared: parameters that several segments read, by name and pipe.
        bucket_bytes: gradients are summed over replicas as soon as so many bytes are final; None
            where nobody else holds the rank's stages.
        every_microbatch: whether gradients of shared parameters travel after every microbatch.
        open_sends: sends of a rank whose buffers may be held at a time.
    """

    rank: int
    schedule: Schedule
    program: Program
    memory: Mapping[int, SegmentMemory]
    derived_bytes: int
    shared: Mapping[tuple[str, int], SharedHere]
    bucket_bytes: int | None
    every_microbatch: bool
    open_sends: int


@dataclass(slots=True)
class _Record:
    """A segment's forward: what it holds for the backward."""

    inputs: list[Hashable]
    activations: list[Hashable] | None = None


@dataclass(slots=True)
class Walk:
    """One step of training on one rank.

    Args:
        around: what it needs to know.
        ledger: what is held; the caller has put in what stays throughout.
    """

    around: Surroundings
    ledger: Ledger
    _sends: Window = field(init=False)
    _made: dict[tuple[Payload, int, int], Keys] = field(default_factory=dict)
    _arrived: dict[tuple[Payload, int, int], Keys] = field(default_factory=dict)
    _records: dict[tuple[int, int], list[_Record]] = field(default_factory=dict)
    _stages_left: Counter[int] = field(default_factory=Counter)
    _seen: set[str] = field(default_factory=set)
    _bytes: Mapping[str, int] = field(init=False)
    _last: dict[int, int] = field(default_factory=dict)
    # Bytes of final gradients in the open bucket, and buckets that are being summed.
    _bucket: int = 0
    _num_buckets: int = 0
    _shares: dict[str, Window] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Nothing has been sent."""
        around = self.around
        self._sends = Window(self.ledger, around.open_sends)
        self._bytes = {name: meta.num_bytes for name, meta in parameters_of(around.program).items()}
        for action in around.schedule.actions[around.rank]:
            if action.kind in FINAL_KINDS:
                self._last[action.stage] = action.microbatch
                self._stages_left[action.microbatch] += 1

    def run(self, steps: Sequence[Step]) -> None:
        """Take all of a rank's steps."""
        handlers: dict[type[Any], Callable[[Any], None]] = {
            Compute: lambda step: _ACTIONS[step.action.kind](self, step.action),
            Send: self._send,
            Receive: self._receive,
            ReduceGradients: lambda step: self._flush(),
        }
        for step in steps:
            if type(step) in handlers:
                handlers[type(step)](step)
        self._flush()
        self.ledger.look("end")
        for sends in (self._sends, *self._shares.values()):
            sends.close()

    # ---- transfers ----

    def _send(self, step: Send) -> None:
        self._sends.add(_storages(self._made.pop((step.payload, step.stage, step.microbatch))))

    def _receive(self, step: Receive) -> None:
        """Buffers for what the neighbouring stage sends."""
        program = self.around.program
        if step.payload is Payload.ACTIVATION:
            stage = step.stage + 1
            names = program.stages[stage].received
        else:
            stage = step.stage - 1
            names = program.gradients_of(program.stages[stage].sent)
        keys: Keys = {name: (step.payload, stage, step.microbatch, name) for name in names}
        for name, key in keys.items():
            self.ledger.hold(key, program.values[name].num_bytes, Part.COMMUNICATION, stage)
        self._arrived[step.payload, step.stage, step.microbatch] = keys

    def _take(self, payload: Payload, producer: int, microbatch: int) -> Keys:
        """What a neighbouring stage gave; its holder is now who takes it."""
        key = (payload, producer, microbatch)
        if not 0 <= producer < self.around.schedule.num_stages:
            return {}
        return self._made.pop(key) if key in self._made else self._arrived.pop(key)

    # ---- actions ----

    def _forward(self, action: Action) -> None:
        stage, number = action.stage, action.microbatch
        program = self.around.program.stages[stage]
        if not self.ledger.has(("derived", number)):
            self.ledger.hold(("derived", number), self.around.derived_bytes)
        values = self._take(Payload.ACTIVATION, stage - 1, number)
        records = self._records[stage, number] = []
        keeps_all = not self.around.schedule.recompute[stage]
        for segment in program.segments:
            # One without a backward keeps nothing.
            inputs = {n: values[n] for n in segment.segment.inputs} if segment.trains else {}
            record = _Record(_storages(inputs))
            for key in record.inputs:
                self.ledger.again(key)
            memory = self.around.memory[segment.segment.index]
            stays = (keeps_all or segment.kept) and segment.trains
            taken = memory.kept_forward_bytes if stays else memory.forward_bytes
            self.ledger.look(self.around.schedule.label(action), taken, stage)
            outputs = self._outputs(segment, "F", (stage, number), values)
            if stays:
                record.activations = self._keep(segment, (stage, number), outputs)
            values |= outputs
            records.append(record)
        self._hand_on(Payload.ACTIVATION, action, {n: values[n] for n in program.sent})
        self.ledger.release_all(_storages(values))

    def _outputs(
        self, segment: SegmentProgram, when: str, place: tuple[int, int], values: Keys
    ) -> Keys:
        """A segment's outputs, held once each."""
        memory = self.around.memory[segment.segment.index]
        keys: Keys = {}
        for name, output in memory.outputs.items():
            if output.root in values or not output.root:
                key = values.get(output.root)
            else:
                key = (when, *place, output.root)
            keys[name] = key
            if key is not None:
                self.ledger.hold(key, output.num_bytes, stage=place[0])
        return keys

    def _keep(
        self, segment: SegmentProgram, place: tuple[int, int], outputs: Keys
    ) -> list[Hashable]:
        """Hold what autograd saves, and the outputs once more."""
        index = segment.segment.index
        saved = ("saved", *place, index)
        self.ledger.hold(saved, self.around.memory[index].saved_bytes, stage=place[0])
        held = _storages(outputs)
        for key in held:
            self.ledger.again(key)
        return [saved, *held]

    def _hand_on(self, payload: Payload, action: Action, values: Keys) -> None:
        """Hold what goes to the neighbouring stage until it has gone."""
        neighbour = action.stage + (1 if payload is Payload.ACTIVATION else -1)
        if 0 <= neighbour < self.around.schedule.num_stages:
            for key in _storages(values):
                self.ledger.again(key)
            self._made[payload, action.stage, action.microbatch] = values

    def _recompute(self, action: Action) -> None:
        stage, number = action.stage, action.microbatch
        segments = self.around.program.stages[stage].segments
        for segment, record in zip(segments, self._records[stage, number], strict=True):
            self._bring_back(segment, record, action)

    def _bring_back(self, segment: SegmentProgram, record: _Record, action: Action) -> None:
        if record.activations is not None or not segment.trains:
            return
        memory = self.around.memory[segment.segment.index]
        place = (action.stage, action.microbatch)
        self.ledger.look(
            self.around.schedule.label(action), memory.kept_forward_bytes, action.stage
        )
        # An output in an input's storage adds nothing: the record holds the input.
        values: Keys = dict.fromkeys(segment.segment.inputs)
        outputs = self._outputs(segment, "R", place, values)
        record.activations = self._keep(segment, place, outputs)
        self.ledger.release_all(_storages(outputs))

    def _backward(self, action: Action) -> None:
        stage, number = action.stage, action.microbatch
        around = self.around
        program = around.program.stages[stage]
        gradients = self._take(Payload.GRADIENT, stage + 1, number)
        records = self._records.pop((stage, number))
        for segment in reversed(program.segments):
            record = records.pop()
            if not segment.trains:
                continue
            self._bring_back(segment, record, action)
            self._segment_backward(segment, action, gradients)
            self.ledger.release_all([*record.inputs, *(record.activations or ())])
        wanted = around.program.gradients_of(program.received)
        for name in wanted:
            if name not in gradients:
                self._hold_gradient(name, action, gradients)
        self._hand_on(Payload.GRADIENT, action, {name: gradients[name] for name in wanted})
        self.ledger.release_all(_storages(gradients))
        if action.kind in FINAL_KINDS:
            self._complete(action)

    def _segment_backward(self, segment: SegmentProgram, action: Action, gradients: Keys) -> None:
        memory = self.around.memory[segment.segment.index]
        names = trained(segment)
        # Asynchronous schedules give every microbatch leaves of its own, and so new gradients.
        is_synchronous = self.around.schedule.is_synchronous
        is_first = not is_synchronous or any(name not in self._seen for name in names)
        taken = memory.first_backward_bytes if is_first else memory.backward_bytes
        self.ledger.look(self.around.schedule.label(action), taken, action.stage)
        for name in names:
            self._add_gradient(name, segment, action)
            if not is_synchronous:
                leaf = ("leaf", action.stage, action.microbatch, name)
                self.ledger.hold(leaf, self._bytes[name], Part.TEMPORARY, action.stage)
        for name in segment.segment.inputs:
            if self.around.program.values[name].requires_grad and name not in gradients:
                self._hold_gradient(name, action, gradients)
        for name in segment.segment.outputs:
            key = gradients.pop(name, None)
            if key is not None:
                self.ledger.release(key)
        if action.kind is Kind.INPUT_GRADIENT:
            waiting = ("waiting", action.stage, action.microbatch, segment.segment.index)
            self.ledger.hold(waiting, memory.deferred_bytes, stage=action.stage)

    def _hold_gradient(self, name: str, action: Action, gradients: Keys) -> None:
        key = ("gradient", action.stage, action.microbatch, name)
        num_bytes = self.around.program.values[name].num_bytes
        self.ledger.hold(key, num_bytes, Part.TEMPORARY, action.stage)
        gradients[name] = key

    def _weight_gradient(self, action: Action) -> None:
        segments = self.around.program.stages[action.stage].segments
        names = [name for segment in segments for name in trained(segment)]
        largest = max((self._bytes[name] for name in names), default=0)
        self.ledger.look(self.around.schedule.label(action), largest, action.stage)
        for segment in (s for s in segments if s.trains):
            key = ("waiting", action.stage, action.microbatch, segment.segment.index)
            self.ledger.release(key)
        for name in names:
            if self._shared(name, action) is None:
                self._reduce(name, action)
        self._complete(action)

    def _complete(self, action: Action) -> None:
        number = action.microbatch
        if not self.around.schedule.is_synchronous:
            for segment in self.around.program.stages[action.stage].segments:
                for name in trained(segment):
                    self.ledger.release(("leaf", action.stage, number, name))
        self._stages_left[number] -= 1
        if self._stages_left[number] == 0:
            self.ledger.release(("derived", number))

    # ---- gradients of parameters ----

    def _add_gradient(self, name: str, segment: SegmentProgram, action: Action) -> None:
        shared = self._shared(name, action)
        if shared is not None:
            self._add_shared(name, shared, segment, action)
            return
        self._gradient_exists(name)
        self._reduce(name, action)

    def _shared(self, name: str, action: Action) -> SharedHere | None:
        pipe = self.around.schedule.microbatch_pipes[action.microbatch]
        return self.around.shared.get((name, pipe))

    def _gradient_exists(self, name: str) -> None:
        if name not in self._seen:
            self._seen.add(name)
            self.ledger.hold(("gradient of", name), self._bytes[name], Part.GRADIENTS)

    def _reduce(self, name: str, action: Action) -> None:
        """A final gradient goes into a bucket; a full one is copied, to be summed over replicas."""
        is_last = action.microbatch == self._last[action.stage]
        if self.around.bucket_bytes is None or not is_last or action.kind not in FINAL_KINDS:
            return
        self._bucket += self._bytes[name]
        if self._bucket >= self.around.bucket_bytes:
            self._flush()

    def _flush(self) -> None:
        if self._bucket:
            self._num_buckets += 1
            self.ledger.hold(("bucket", self._num_buckets), self._bucket, Part.COMMUNICATION)
            self._bucket = 0

    def _add_shared(
        self, name: str, shared: SharedHere, segment: SegmentProgram, action: Action
    ) -> None:
        """A share of a shared parameter's gradient, which waits for those of other segments."""
        number = action.microbatch if self.around.every_microbatch else 0
        key, num_bytes = ("share", name, number), self._bytes[name]
        if not self.ledger.has(key):
            self.ledger.hold(key, num_bytes, Part.COMMUNICATION, action.stage)
        is_last = action.microbatch == self._last[action.stage]
        if segment.segment.index != shared.first or not (self.around.every_microbatch or is_last):
            return
        if not shared.owned:
            sends = self._shares.setdefault(name, Window(self.ledger, shared.open_sends))
            sends.add([key])
            if is_last:  # the owner's sum comes at the end
                self._gradient_exists(name)
            return
        self._gradient_exists(name)
        self.ledger.release(key)
        if shared.num_holders > 1 and not self.ledger.has(("ahead", name)):
            # The share of the next microbatch is posted ahead.
            self.ledger.hold(("ahead", name), num_bytes, Part.COMMUNICATION, action.stage)
        if is_last:
            self._reduce(name, action)


def trained(segment: SegmentProgram) -> list[str]:
    """Names of the parameters that a segment gives gradients to."""
    nodes = segment.segment.graph.find_nodes(op="placeholder")
    parameters = [node for node in nodes if node.meta["kind"] is ValueKind.PARAMETER]
    return [n.meta["name"] for n in parameters if n.meta["tensor"].requires_grad]


def parameters_of(program: Program) -> dict[str, TensorMeta]:
    """What this rank's share of each parameter is that its segments read."""
    return {
        node.meta["name"]: node.meta["tensor"]
        for stage in program.stages.values()
        for segment in stage.segments
        for node in segment.segment.graph.find_nodes(op="placeholder")
        if node.meta["kind"] is ValueKind.PARAMETER
    }


def _storages(values: Keys) -> list[Hashable]:
    return [key for key in values.values() if key is not None]


_ACTIONS: dict[Kind, Callable[[Walk, Action], None]] = {
    Kind.FORWARD: Walk._forward,
    Kind.RECOMPUTE: Walk._recompute,
    Kind.BACKWARD: Walk._backward,
    Kind.INPUT_GRADIENT: Walk._backward,
    Kind.WEIGHT_GRADIENT: Walk._weight_gradient,
}
