"""The memory timeline of a rank: its steps, interpreted as changes of the bytes that it holds.

The timeline does with bytes what the engine does with tensors: the same storages are taken and
released by the same steps.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

from merak.graph.program.program import SegmentProgram
from merak.plan.cost.segments.memory import BackwardMemory, SegmentMemory
from merak.plan.memory.context import MemoryContext, trained_parameters
from merak.plan.memory.gradients import Gradients
from merak.plan.memory.host import HostMemory, OffloadRecord
from merak.plan.memory.ledger import Category, Ledger, SendWindow
from merak.plan.memory.unshards import UnshardMemory, needs_parameters
from merak.schedule.interpreter import StepInterpreter
from merak.schedule.ir import Action, Kind
from merak.schedule.steps import (
    MAX_OPEN_SENDS,
    OptimizerStep,
    Payload,
    Receive,
    ReduceGradients,
    Send,
    Step,
)

Keys = dict[str, Hashable]
"""Storage of each value by name; None for one that costs nothing."""


@dataclass(slots=True)
class _Record:
    """Storages that a segment's forward holds for its backward.

    Args:
        values: its inputs, and what it saves of its outputs, by name; what it saves besides, or
            keeps for its recomputation, without one.
        is_saved: whether it needs no recomputation.
        offloaded: storages in host memory.
    """

    values: Keys
    is_saved: bool = False
    offloaded: OffloadRecord | None = None


class MemoryTimeline(StepInterpreter):
    """Memory timeline of one training step on one rank.

    Args:
        ctx: everything that it depends on besides the steps.
        ledger: of the rank; the caller has added what is held throughout.
    """

    def __init__(self, ctx: MemoryContext, ledger: Ledger) -> None:
        super().__init__(ctx.schedule, ctx.rank)
        self.ctx = ctx
        self.ledger = ledger
        self.host = HostMemory(ledger)
        self._sends = SendWindow(ledger, MAX_OPEN_SENDS)
        self._gradients = Gradients(ctx, ledger)
        self._unshards = UnshardMemory(ctx, ledger)
        self._made: dict[tuple[Payload, int, int], Keys] = {}
        self._arrived: dict[tuple[Payload, int, int], Keys] = {}
        self._records: dict[tuple[int, int], list[_Record]] = {}
        self._deferred: dict[tuple[int, int, int], list[Hashable]] = {}
        own = [segment for stage in ctx.program.stages.values() for segment in stage.segments]
        self._trained = {segment.segment.index: trained_parameters(segment) for segment in own}
        self._noncontiguous = {
            name
            for segment in own
            for name, output in ctx.memory[segment.segment.index].outputs.items()
            if not output.is_contiguous
        }

    def run(self, steps: Sequence[Step]) -> None:
        """Interpret all of the rank's steps."""
        self.run_steps(steps)
        self._gradients.flush("end")
        self.ledger.record_peak("end")
        self._unshards.finish()
        self._gradients.finish()
        self._sends.close()

    def reduce(self, step: ReduceGradients) -> None:
        """Reduce the open bucket."""
        self._gradients.flush("end")

    def step_optimizer(self, step: OptimizerStep) -> None:
        """Hold nothing: the memory model counts the optimizer's step after the timeline."""

    # ---- transfers ----

    def send(self, step: Send) -> None:
        """Hold the values that are sent, or copies of those that are not contiguous."""
        values = self._made.pop((step.payload, step.stage, step.microbatch))
        copied = (
            values.keys() & self._noncontiguous if step.payload is Payload.ACTIVATION else set()
        )
        for name in sorted(copied):
            copy = ("copy", step.stage, step.microbatch, name)
            num_bytes = self.ctx.program.values[name].num_bytes
            self.ledger.hold(copy, num_bytes, Category.COMMUNICATION, step.stage)
            original, values[name] = values[name], copy
            if original is not None:
                self.ledger.release(original)
        self._sends.add(_storages(values))

    def receive(self, step: Receive) -> None:
        """Hold the receive buffers of a transfer."""
        program = self.ctx.program
        if step.payload is Payload.ACTIVATION:
            stage = step.stage + 1
            names = program.stages[stage].received
        else:
            stage = step.stage - 1
            names = program.gradients_of(program.stages[stage].sent)
        keys: Keys = {name: (step.payload, stage, step.microbatch, name) for name in names}
        for name, key in keys.items():
            self.ledger.hold(key, program.values[name].num_bytes, Category.COMMUNICATION, stage)
        self._arrived[step.payload, step.stage, step.microbatch] = keys

    def _take(self, payload: Payload, producer: int, microbatch: int) -> Keys:
        """Values from the neighbouring stage, whose holder is now the caller."""
        key = (payload, producer, microbatch)
        if not 0 <= producer < self.ctx.schedule.num_stages:
            return {}
        return self._made.pop(key) if key in self._made else self._arrived.pop(key)

    # ---- actions ----

    def prefetch(self, action: Action) -> None:
        """Begin to copy back the activations that a backward needs first."""
        self._fetch(self._records.get((action.stage, action.microbatch), []))

    def _fetch(self, records: Sequence[_Record]) -> None:
        """Begin to copy back the offloaded activations of the last of some segments."""
        if records:
            self.host.fetch(records[-1].offloaded)

    def forward(self, action: Action) -> None:
        """Run the segments of a stage forward."""
        stage, number = action.stage, action.microbatch
        program = self.ctx.program.stages[stage]
        if not self.ledger.has(("derived", number)):
            self.ledger.hold(("derived", number), self.ctx.derived_bytes)
        values = self._take(Payload.ACTIVATION, stage - 1, number)
        place = (stage, number)
        records = self._records[place] = []
        saves_all = not self.ctx.schedule.recompute[stage]
        for segment in program.segments:
            self._unshards.begin(segment, action)
            # One without a backward saves nothing.
            inputs = {n: values[n] for n in segment.segment.inputs} if segment.trains else {}
            offloads = segment.offload is not None
            record = _Record({} if offloads else inputs)
            for key in _storages(record.values):
                self.ledger.share(key)
            saves = (saves_all or segment.saved) and segment.trains
            memory = self.ctx.memory[segment.segment.index] if saves else self._recomputed(segment)
            taken = memory.saving_forward_bytes if saves else memory.forward_bytes
            self.ledger.record_peak(action, taken, stage)
            outputs = self._outputs(segment, "F", place, values)
            if offloads:
                record.offloaded = self.host.forward(segment, memory, place, {**inputs, **outputs})
                record.is_saved = True
            elif saves:
                self._save(segment, place, record, outputs, memory)
            elif segment.trains and memory.kept_bytes:
                kept = ("kept", stage, number, segment.segment.index)
                self.ledger.hold(kept, memory.kept_bytes, stage=stage)
                record.values = {**record.values, "": kept}
            values |= outputs
            records.append(record)
            self._unshards.end(segment, action)
            self.host.segment_ended()
        self._hand_on(Payload.ACTIVATION, action, {n: values[n] for n in program.sent})
        self.ledger.release_all(_storages(values))

    def _recomputed(self, segment: SegmentProgram) -> SegmentMemory:
        """Memory of a segment that saves some operators' results at most."""
        index = segment.segment.index
        ops = self.ctx.selective.get(index)
        return self.ctx.memory[index] if ops is None else ops.memory

    def _outputs(
        self, segment: SegmentProgram, when: str, place: tuple[int, int], values: Keys
    ) -> Keys:
        """Hold each of a segment's outputs once."""
        memory = self.ctx.memory[segment.segment.index]
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

    def _save(
        self,
        segment: SegmentProgram,
        place: tuple[int, int],
        record: _Record,
        outputs: Keys,
        memory: SegmentMemory,
    ) -> None:
        """Hold what a segment saves, and share the outputs that are among it."""
        own = ("saved", *place, segment.segment.index)
        self.ledger.hold(own, memory.saved_bytes, stage=place[0])
        saved = {name: outputs[name] for name in memory.outputs if name in memory.saved_outputs}
        for key in _storages(saved):
            self.ledger.share(key)
        record.values, record.is_saved = {**record.values, **saved, "": own}, True

    def _hand_on(self, payload: Payload, action: Action, values: Keys) -> None:
        """Hold the values for the neighbouring stage until they are sent."""
        neighbour = action.stage + (1 if payload is Payload.ACTIVATION else -1)
        if 0 <= neighbour < self.ctx.schedule.num_stages:
            for key in _storages(values):
                self.ledger.share(key)
            self._made[payload, action.stage, action.microbatch] = values

    def recompute(self, action: Action) -> None:
        """Recompute the segments of a stage."""
        stage, number = action.stage, action.microbatch
        segments = self.ctx.program.stages[stage].segments
        for segment, record in zip(segments, self._records[stage, number], strict=True):
            if needs_parameters(segment, action.kind, self.ctx.schedule.recompute[stage]):
                self._unshards.begin(segment, action)
                self._recompute_segment(segment, record, action)
                self._unshards.end(segment, action)

    def _recompute_segment(self, segment: SegmentProgram, record: _Record, action: Action) -> None:
        if record.is_saved or not segment.trains:
            return
        memory = self._recomputed(segment)
        place = (action.stage, action.microbatch)
        self.ledger.record_peak(action, memory.recompute_bytes, action.stage)
        # What the backward reads of what was kept is now among what is saved.
        self.ledger.release_all(filter(None, [record.values.get("")]))
        # An output in an input's storage adds nothing: the record holds the input.
        values: Keys = dict.fromkeys(segment.segment.inputs)
        outputs = self._outputs(segment, "R", place, values)
        self._save(segment, place, record, outputs, memory)
        self.ledger.release_all(_storages(outputs))

    def backward(self, action: Action) -> None:
        """Run the segments of a stage backward."""
        stage, number = action.stage, action.microbatch
        ctx = self.ctx
        program = ctx.program.stages[stage]
        gradients = self._take(Payload.GRADIENT, stage + 1, number)
        records = self._records.pop((stage, number))
        for segment in reversed(program.segments):
            self._fetch(records)
            record = records.pop()
            self._fetch(records)
            if segment.trains:
                self._unshards.begin(segment, action)
                if record.is_saved or self._recomputed(segment).whole_in_turns is None:
                    self._recompute_segment(segment, record, action)
                self._segment_backward(segment, action, gradients, record)
                self._unshards.end(segment, action)
                self.ledger.release_all(_storages(record.values))
            if record.offloaded is not None:
                self.host.release([record.offloaded])
            self.host.segment_ended()
        wanted = ctx.program.gradients_of(program.received)
        for name in wanted:
            if name not in gradients:
                self._hold_gradient(name, action, gradients)
        self._hand_on(Payload.GRADIENT, action, {name: gradients[name] for name in wanted})
        self.ledger.release_all(_storages(gradients))

    def _segment_backward(
        self, segment: SegmentProgram, action: Action, gradients: Keys, record: _Record
    ) -> None:
        splits = action.kind is Kind.INPUT_GRADIENT
        backward = self._backward_memory(segment, splits, recomputes=not record.is_saved)
        later = self._unshards.reduced_later(segment, action)
        self._gain(segment, action, backward, later)
        for name in segment.segment.inputs:
            if self.ctx.program.values[name].requires_grad and name not in gradients:
                count = 1 + (name in self.ctx.memory[segment.segment.index].read_whole)
                self._hold_gradient(name, action, gradients, count)
        for name in segment.segment.outputs:
            key = gradients.pop(name, None)
            if key is not None:
                self.ledger.release(key)
        if later and backward.reads_parameters:  # made at once, while they are there
            taken = backward.held_bytes + backward.first_weights_bytes
            self.ledger.record_peak(action, taken, action.stage)
            self._unshards.leave(later)
        elif splits:
            self._defer(segment, action, backward, record)

    def _gain(
        self,
        segment: SegmentProgram,
        action: Action,
        backward: BackwardMemory,
        later: Collection[str],
    ) -> None:
        """Hold the gradients of parameters that a backward makes, those of `later` whole."""
        names = [name for name in self._trained[segment.segment.index] if name not in later]
        left = [name for name in later if not _is_deferred(name, segment, backward)]
        # Asynchronous schedules give every microbatch leaves of its own, and so new gradients.
        is_synchronous = self.ctx.schedule.is_synchronous
        is_new = self._gradients.are_new(names) or self._unshards.are_new(left)
        is_first = not is_synchronous or is_new
        taken = backward.first_bytes if is_first else backward.later_bytes
        self.ledger.record_peak(action, taken, action.stage)
        self._unshards.leave(left)
        is_quiet = not is_first and self._gradients.adds_in_place(names, action)
        for name in () if is_quiet else names:
            self._gradients.add(name, segment, action)
            if not is_synchronous:
                leaf = ("leaf", action.stage, action.microbatch, name)
                self.ledger.hold(
                    leaf, self._gradients.bytes[name], Category.TEMPORARY, action.stage
                )

    def _defer(
        self, segment: SegmentProgram, action: Action, backward: BackwardMemory, record: _Record
    ) -> None:
        """Hold what gradients of weights are made of later."""
        key = (action.stage, action.microbatch, segment.segment.index)
        names = sorted(backward.held_values)
        held = {name: record.values.get(name) for name in names}
        back = names if record.offloaded is not None else []
        num_bytes = sum(self.ctx.program.values[name].num_bytes for name in back)
        deferred: Hashable = ("deferred", *key)
        self.ledger.hold(deferred, backward.held_bytes + num_bytes, stage=action.stage)
        self._deferred[key] = [deferred, *dict.fromkeys(_storages(held))]
        for shared in self._deferred[key][1:]:
            self.ledger.share(shared)

    def _backward_memory(
        self, segment: SegmentProgram, splits: bool, recomputes: bool
    ) -> BackwardMemory:
        """Memory of a backward that follows a recomputation, or has its own inside."""
        if not recomputes:
            memory = self.ctx.memory[segment.segment.index]
            return memory.split if splits else memory.whole
        memory = self._recomputed(segment)
        found = memory.split_in_turns if splits else memory.whole_in_turns
        assert found is not None
        return found

    def _hold_gradient(self, name: str, action: Action, gradients: Keys, count: int = 1) -> None:
        key = ("gradient", action.stage, action.microbatch, name)
        num_bytes = count * self.ctx.program.values[name].num_bytes
        self.ledger.hold(key, num_bytes, Category.TEMPORARY, action.stage)
        gradients[name] = key

    def input_gradient(self, action: Action) -> None:
        """Run the segments of a stage backward, without the gradients of weights."""
        self.backward(action)

    def weight_gradient(self, action: Action) -> None:
        """Add the deferred gradients of weights."""
        stage, number = action.stage, action.microbatch
        segments = [s for s in self.ctx.program.stages[stage].segments if s.trains]
        later = {s.segment.index: self._unshards.reduced_later(s, action) for s in segments}
        for segment in reversed(segments):
            index = segment.segment.index
            if (deferred := self._deferred.pop((stage, number, index), None)) is not None:
                own = self.ctx.memory[index].split
                taken = own.first_weights_bytes if later[index] else own.weights_bytes
                self.ledger.record_peak(action, taken, stage)
                self.ledger.release_all(deferred)
            for name in later[index]:
                self._gradients.add(name, segment, action)
            self._unshards.reduce(segment, action)
        for segment in segments:
            index = segment.segment.index
            for name in self._trained[index]:
                if name not in later[index] and self._gradients.tied(name, action) is None:
                    self._gradients.reduce(name, action)

    def complete(self, action: Action) -> None:
        """Release what a stage holds for a microbatch until its gradients are complete."""
        number = action.microbatch
        if not self.ctx.schedule.is_synchronous:
            for segment in self.ctx.program.stages[action.stage].segments:
                for name in self._trained[segment.segment.index]:
                    self.ledger.release(("leaf", action.stage, number, name))
        if self.ctx.zero.gradients:
            self._gradients.flush(action)
        super().complete(action)

    def microbatch_done(self, microbatch: int) -> None:
        """Release the batch-only values of a microbatch."""
        self.ledger.release(("derived", microbatch))


def _storages(values: Keys) -> list[Hashable]:
    return [key for key in values.values() if key is not None]


def _is_deferred(name: str, segment: SegmentProgram, backward: BackwardMemory) -> bool:
    """Whether a backward leaves the gradient of a parameter for later."""
    return segment.segment.parameters.index(name) in backward.deferred
