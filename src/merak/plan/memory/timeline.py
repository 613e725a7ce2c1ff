"""The memory timeline of a rank: its steps as changes of what it holds; see `ledger`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from merak.graph.program.program import SegmentProgram
from merak.plan.cost.selective_ops import Dear
from merak.plan.memory.context import Surroundings, trained
from merak.plan.memory.gradients import Gradients
from merak.plan.memory.host import AwayRecord, HostMemory
from merak.plan.memory.ledger import Ledger, Part, Window
from merak.schedule.ir import FINAL_KINDS, Action, Kind
from merak.schedule.steps import Compute, Payload, Receive, ReduceGradients, Send, Step

Keys = dict[str, Hashable]
"""Values by name, and the storage each lies in; None for one that costs nothing."""


@dataclass(slots=True)
class _Record:
    """A segment's forward: what it holds for the backward."""

    inputs: list[Hashable]
    activations: list[Hashable] | None = None
    dear: Hashable = None
    away: AwayRecord | None = None


@dataclass(slots=True)
class Walk:
    """One step of training on one rank.

    Args:
        around: what it needs to know.
        ledger: what is held; the caller has put in what stays throughout.
    """

    around: Surroundings
    ledger: Ledger
    host: HostMemory = field(init=False)
    _sends: Window = field(init=False)
    _made: dict[tuple[Payload, int, int], Keys] = field(default_factory=dict)
    _arrived: dict[tuple[Payload, int, int], Keys] = field(default_factory=dict)
    _records: dict[tuple[int, int], list[_Record]] = field(default_factory=dict)
    _stages_left: Counter[int] = field(default_factory=Counter)
    _gradients: Gradients = field(init=False)
    _following: dict[Action, Action] = field(init=False)
    _scattered: set[str] = field(init=False)

    def __post_init__(self) -> None:
        """Nothing has been sent."""
        around = self.around
        self._sends = Window(self.ledger, around.open_sends)
        self.host = HostMemory(self.ledger)
        self._gradients = Gradients(around, self.ledger)
        self._scattered = {
            name
            for stage in around.program.stages.values()
            for segment in stage.segments
            for name, output in around.memory[segment.segment.index].outputs.items()
            if not output.in_a_row
        }
        own = around.schedule.actions[around.rank]
        self._following = dict(pairwise(own))
        for action in own:
            if action.kind in FINAL_KINDS:
                self._stages_left[action.microbatch] += 1

    def run(self, steps: Sequence[Step]) -> None:
        """Take all of a rank's steps."""
        handlers: dict[type[Any], Callable[[Any], None]] = {
            Compute: self._compute,
            Send: self._send,
            Receive: self._receive,
            ReduceGradients: lambda step: self._gradients.flush("end"),
        }
        for step in steps:
            if type(step) in handlers:
                handlers[type(step)](step)
        self._gradients.flush("end")
        self.ledger.look("end")
        self._gradients.finish()
        self._sends.close()

    # ---- transfers ----

    def _send(self, step: Send) -> None:
        """Hold what travels: the values, or copies of those that do not lie in a row."""
        values = self._made.pop((step.payload, step.stage, step.microbatch))
        copied = values.keys() & self._scattered if step.payload is Payload.ACTIVATION else set()
        for name in sorted(copied):
            copy = ("copy", step.stage, step.microbatch, name)
            num_bytes = self.around.program.values[name].num_bytes
            self.ledger.hold(copy, num_bytes, Part.COMMUNICATION, step.stage)
            before, values[name] = values[name], copy
            if before is not None:
                self.ledger.release(before)
        self._sends.add(_storages(values))

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

    def _compute(self, step: Compute) -> None:
        following = self._following.get(step.action)
        if following is not None and following.kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT):
            self._fetch(self._records.get((following.stage, following.microbatch), []))
        _ACTIONS[step.action.kind](self, step.action)

    def _fetch(self, records: Sequence[_Record]) -> None:
        """What the last of some segments keeps in host memory comes back."""
        if records:
            self.host.fetch(records[-1].away)

    def _forward(self, action: Action) -> None:
        stage, number = action.stage, action.microbatch
        program = self.around.program.stages[stage]
        if not self.ledger.has(("derived", number)):
            self.ledger.hold(("derived", number), self.around.derived_bytes)
        values = self._take(Payload.ACTIVATION, stage - 1, number)
        place = (stage, number)
        records = self._records[place] = []
        keeps_all = not self.around.schedule.recompute[stage]
        for segment in program.segments:
            # One without a backward keeps nothing.
            inputs = {n: values[n] for n in segment.segment.inputs} if segment.trains else {}
            goes = segment.offload is not None
            record = _Record([] if goes else _storages(inputs))
            for key in record.inputs:
                self.ledger.again(key)
            memory = self.around.memory[segment.segment.index]
            stays = (keeps_all or segment.saved) and segment.trains
            dear = None if stays or not segment.trains else self._dear(segment)
            taken = memory.kept_forward_bytes if stays else memory.forward_bytes
            taken = taken if dear is None else dear.forward_bytes
            self.ledger.look(self.around.schedule.label(action), taken, stage)
            outputs = self._outputs(segment, "F", place, values)
            if goes:
                record.away = self.host.forward(segment, memory, place, {**inputs, **outputs})
                record.activations = []
            elif stays:
                saved_bytes = memory.saved_bytes
                record.activations = self._keep(segment, place, outputs, saved_bytes)
            elif dear is not None:
                record.dear = ("dear", stage, number, segment.segment.index)
                self.ledger.hold(record.dear, dear.held_bytes, stage=stage)
            values |= outputs
            records.append(record)
            self.host.turn()
        self._hand_on(Payload.ACTIVATION, action, {n: values[n] for n in program.sent})
        self.ledger.release_all(_storages(values))

    def _dear(self, segment: SegmentProgram) -> Dear | None:
        return self.around.partly.get(segment.segment.index)

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
        self, segment: SegmentProgram, place: tuple[int, int], outputs: Keys, saved_bytes: int
    ) -> list[Hashable]:
        """Hold what autograd saves, and the outputs once more."""
        saved = ("saved", *place, segment.segment.index)
        self.ledger.hold(saved, saved_bytes, stage=place[0])
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
        taken, saved_bytes = memory.kept_forward_bytes, memory.saved_bytes
        dear = self._dear(segment) if record.dear is not None else None
        if dear is not None:
            taken, saved_bytes = dear.replay_bytes, dear.replayed_bytes - memory.own_bytes
        self.ledger.look(self.around.schedule.label(action), taken, action.stage)
        if dear is not None:  # what was kept is now among what autograd has saved
            self.ledger.release(record.dear)
        # An output in an input's storage adds nothing: the record holds the input.
        values: Keys = dict.fromkeys(segment.segment.inputs)
        outputs = self._outputs(segment, "R", place, values)
        record.activations = self._keep(segment, place, outputs, saved_bytes)
        self.ledger.release_all(_storages(outputs))

    def _backward(self, action: Action) -> None:
        stage, number = action.stage, action.microbatch
        around = self.around
        program = around.program.stages[stage]
        gradients = self._take(Payload.GRADIENT, stage + 1, number)
        records = self._records.pop((stage, number))
        for segment in reversed(program.segments):
            self._fetch(records)
            record = records.pop()
            self._fetch(records)
            if segment.trains:
                self._bring_back(segment, record, action)
                self._segment_backward(segment, action, gradients)
                self.ledger.release_all([*record.inputs, *(record.activations or ())])
            if record.away is not None:
                self.host.release([record.away])
            self.host.turn()
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
        is_first = not is_synchronous or self._gradients.are_new(names)
        taken = memory.first_backward_bytes if is_first else memory.backward_bytes
        self.ledger.look(self.around.schedule.label(action), taken, action.stage)
        for name in names:
            self._gradients.add(name, segment, action)
            if not is_synchronous:
                leaf = ("leaf", action.stage, action.microbatch, name)
                self.ledger.hold(leaf, self._gradients.bytes[name], Part.TEMPORARY, action.stage)
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
        largest = max((self._gradients.bytes[name] for name in names), default=0)
        self.ledger.look(self.around.schedule.label(action), largest, action.stage)
        for segment in (s for s in segments if s.trains):
            key = ("waiting", action.stage, action.microbatch, segment.segment.index)
            self.ledger.release(key)
        for name in names:
            if self._gradients.shared(name, action) is None:
                self._gradients.reduce(name, action)
        self._complete(action)

    def _complete(self, action: Action) -> None:
        number = action.microbatch
        if not self.around.schedule.is_synchronous:
            for segment in self.around.program.stages[action.stage].segments:
                for name in trained(segment):
                    self.ledger.release(("leaf", action.stage, number, name))
        if self.around.sharing.every_microbatch:
            self._gradients.flush(self.around.schedule.label(action))
        self._stages_left[number] -= 1
        if self._stages_left[number] == 0:
            self.ledger.release(("derived", number))


def _storages(values: Keys) -> list[Hashable]:
    return [key for key in values.values() if key is not None]


_ACTIONS: dict[Kind, Callable[[Walk, Action], None]] = {
    Kind.FORWARD: Walk._forward,
    Kind.RECOMPUTE: Walk._recompute,
    Kind.BACKWARD: Walk._backward,
    Kind.INPUT_GRADIENT: Walk._backward,
    Kind.WEIGHT_GRADIENT: Walk._weight_gradient,
}
