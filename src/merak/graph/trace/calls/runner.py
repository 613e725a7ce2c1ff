"""The module that a trace exports: it calls the model, once or several times in a row."""

from __future__ import annotations

import re
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from merak.core.errors import TraceError
from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.state_read import LOSS
from merak.graph.trace.branches.conditions import RandomConditions
from merak.graph.trace.calls.call import Call, InputReshaped, call_model, does_call_model
from merak.graph.trace.calls.eager_loss import (
    EagerReplay,
    LossTail,
    call_to_tail,
    count_calls,
)
from merak.graph.trace.calls.loss_recorder import HostReadsRecorder, LossState
from merak.graph.trace.calls.replay import ModelCall, Replay
from merak.graph.trace.state.counters import Counter, plain, watched
from merak.graph.trace.state.places import StateLeft
from merak.graph.trace.state.slots import MISSING
from merak.graph.trace.state.snapshot import HeldTensor, Snapshot

BEGINS, ENDS = "begins with ", "ends with "
"""Beginnings of names of tensors that a call finds in a buffer, and that it leaves there."""


def of_call(number: int, name: str) -> str:
    """Name of a column or output of one of several calls; of the first call, the name itself."""
    return f"call {number}: {name}" if number else name


def split_call(name: str) -> tuple[int, str]:
    """Number of the call that a column or output is of, and its own name."""
    found = _OF_CALL.match(name)
    return (int(found[1]), name[found.end() :]) if found else (0, name)


_OF_CALL = re.compile(r"call (\d+): ")


def columns_of_calls(batches: Sequence[Mapping[str, TensorMeta]]) -> dict[str, TensorMeta]:
    """Columns of the batches of several calls.

    Args:
        batches: of each call, its columns.
    """
    return {of_call(i, name): meta for i, own in enumerate(batches) for name, meta in own.items()}


@dataclass(slots=True)
class Run:
    """Findings of a traced run; export undoes what forward sets on a module itself.

    Args:
        outputs: names of the outputs.
        remade: buffers that have got another shape.
        left: per call, what it has left in Python state that the one before had not.
        written: attributes, as of `StateLeft`, whose tensors have been written into.
        counters: by label, counters that have been compared with numbers.
        tensors: places of plain tensors that the model holds, by identity.
        recorders: per call, of what its loss reads on the host; none where nothing is recorded.
        to_tail: per call, what the model returned to a loss that has a tail and calls it.
    """

    outputs: tuple[str, ...] = ()
    remade: set[str] = field(default_factory=set)
    left: list[list[StateLeft]] = field(default_factory=list)
    written: set[tuple[int, str] | None] = field(default_factory=set)
    counters: dict[str, Counter] = field(default_factory=dict)
    tensors: dict[int, str] = field(default_factory=dict)
    recorders: list[HostReadsRecorder] = field(default_factory=list)
    to_tail: list[tuple[ModelCall, ...]] = field(default_factory=list)

    def replay(self, call: Call) -> Replay | EagerReplay | None:
        """The loss of the first call, to be run again; None where it was not recorded."""
        if self.to_tail and call.loss_fn is not None:
            return EagerReplay(call.loss_fn, call.fixed, self.to_tail[0])
        if not self.recorders or call.loss_fn is None:
            return None
        return self.recorders[0].replay(call.loss_fn, call.fixed)


class Runner(nn.Module):
    """Calls the model with keyword arguments and returns a flat tuple of named tensors.

    Where it is called several times, each call has a batch of its own and finds tensors of its own
    in buffers that the one before has written: what it reads of another call is Python state.

    Args:
        model: the model.
        call: how it is called.
        conditions: random conditions of its control flow.
        goes_on: whether a plain tensor that a call has replaced is one that the next call reads.
        num_calls: how often it is called.
        counts: per call, values that counters are set to before it, by their label.
        begin: called with the batch before each call; None for nothing.
        tail: of the loss; None for a loss that is traced whole.
    """

    def __init__(
        self,
        model: nn.Module,
        call: Call,
        conditions: RandomConditions,
        goes_on: Callable[[StateLeft], bool],
        num_calls: int = 1,
        counts: Sequence[Mapping[str, float]] = (),
        begin: Callable[[dict[str, torch.Tensor]], None] | None = None,
        tail: LossTail | None = None,
    ) -> None:
        super().__init__()
        self.num_calls_to_tail = 0
        self.counts = tuple(counts)
        self.goes_on = goes_on
        self.begin = begin
        self.model = model
        self.call = call
        self.conditions = conditions
        self.training = model.training
        self.num_calls = num_calls
        self.run = Run()
        self.tail = (tail,)  # which is none of its submodules
        self.attributes = {name: vars(tensor) for name, tensor in _tensors(model)}

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns of all calls."""
        return tuple(of_call(i, n) for i in range(self.num_calls) for n in self.call.columns)

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Call the model with batches, one after another."""
        found: dict[str, torch.Tensor] = {}
        width = len(self.call.columns)
        left: list[StateLeft] = []
        self.run.left.clear()
        self.run.recorders.clear()
        self.run.to_tail.clear()
        for name, tensor in _tensors(self.model):
            for key, value in self.attributes.get(name, {}).items():
                vars(tensor).setdefault(key, value)
        with _tables_anew(self.model, self.run.remade):
            for number in range(self.num_calls):
                own = values[number * width : (number + 1) * width]
                is_last = number + 1 == self.num_calls
                before = self._taken(number)
                self.run.tensors = _places(before)
                buffers = Snapshot.of_buffers(self.model).tensors
                self.conditions.restart(own)
                with _written_buffers(self.model), self._watched_counters(left):
                    batch = dict(zip(self.call.columns, own, strict=True))
                    if self.begin is not None:
                        self.begin(batch)
                    with _shapes_stay(batch):
                        outputs = self._called(batch, before)
                    before.write_in_place(self.goes_on)
                left = before.changes()
                self.run.left.append(left)
                self.run.written |= {h.place.attribute for h in before.written()}
                found |= {of_call(number, name): value for name, value in outputs.items()}
                if self.num_calls > 1:
                    found |= _ended(number, _written(before, buffers), is_last)
        self.run.outputs = tuple(found)
        return (*found.values(), *self.conditions.made)

    def _called(self, batch: dict[str, torch.Tensor], before: Snapshot) -> dict[str, torch.Tensor]:
        """Outputs of a call, and those tensors that its loss reads on the host."""
        (tail,), to_tail = self.tail, self.num_calls_to_tail
        if tail is not None:
            if not to_tail:
                return call_model(self.model, batch, self.call)
            outputs, results = call_to_tail(self.model, batch, self.call, tail, to_tail)
            self.run.to_tail += [results] if results else []
            return outputs
        if not (self.call.reads_on_host and does_call_model(self.call.loss_fn)):
            return call_model(self.model, batch, self.call)

        def restore() -> bool:
            if before.written():
                return False
            for place in before.places:
                if place.root == LOSS:
                    place.restore()
            return True

        def changes() -> list[StateLeft]:
            return [one for one in before.changes() if one.place.root == LOSS]

        state = LossState(changes, restore)
        numbers = [batch[column] for column in self.call.numbers if column in batch]
        is_first = not self.run.recorders  # further calls may read no more than it has
        recorder = HostReadsRecorder(numbers, explores=is_first)
        self.run.recorders.append(recorder)

        def record(run: Callable[[], Any], own: dict[str, torch.Tensor]) -> Any:
            return recorder.record(run, own, state)

        found = call_model(self.model, batch, self.call, record)
        return found | recorder.outputs()

    def find_tail(self, values: Sequence[torch.Tensor]) -> None:
        """Count the calls of the model in the loss, if it has a tail.

        Args:
            values: fake tensors of a batch, in whose mode this runs.
        """
        if self.tail[0] is not None:
            batch = dict(zip(self.call.columns, values, strict=False))
            self.num_calls_to_tail = count_calls(self.model, batch, self.call)

    def _taken(self, number: int) -> Snapshot:
        """Snapshot before a call, with counters set to what they are to be then."""
        found = Snapshot.take(self.model, self.call.loss_fn)
        counts = self.counts[number] if number < len(self.counts) else {}
        if not counts:
            return found
        for place in found.places:
            for key in place.items if place.kind in (object, dict) else ():
                label = str(StateLeft(place, key, None, None))
                if label in counts:
                    place.owner[key] = counts[label]
        return Snapshot.take(self.model, self.call.loss_fn)

    @contextmanager
    def _watched_counters(self, left: Iterable[StateLeft]) -> Iterator[None]:
        """Context with numbers that note what they are compared with in the place of counters."""
        counters = [(one.place.owner, one.key, str(one)) for one in left if _is_counter(one)]
        for owner, key, label in counters:
            if type(owner.get(key)) in (int, float):
                counter = self.run.counters.setdefault(label, Counter(owner[key]))
                counter.value = owner[key]
                owner[key] = watched(owner[key], counter)
        yield
        for owner, key, _ in counters:
            if key in owner:
                owner[key] = plain(owner[key])


@contextmanager
def _shapes_stay(batch: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Raise behind a call that has changed the shape of the batch's own tensors in place."""
    before = {name: _geometry(tensor) for name, tensor in batch.items()}
    yield
    for name, tensor in batch.items():
        if _geometry(tensor) != before[name]:
            raise InputReshaped(f"the model changes the shape of the column {name} in place.")


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.untyped_storage()._cdata


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _places(before: Snapshot) -> dict[int, str]:
    """Places of plain tensors, by identity, but for those that nothing tells apart."""
    count = Counts(held.place.label for held in before.tensors)
    return {
        id(held.tensor): held.place.label.removeprefix("model.")
        for held in before.tensors
        if count[held.place.label] == 1
    }


def _is_counter(left: StateLeft) -> bool:
    return left.place.kind in (object, dict) and type(left.new) in (int, float)


def _written(before: Snapshot, buffers: Iterable[HeldTensor]) -> dict[str, torch.Tensor]:
    """Buffers and plain tensors that a call has written into, and that the next may read."""
    found = {
        held.place.label: held.tensor
        for held in buffers
        if held.is_written or held.place.label.rpartition(".")[2] in _RUNNING
    }
    return found | {plain_name(held.tensor): held.tensor for held in before.written()}


_RUNNING = ("running_mean", "running_var")
"""Buffers that norms of a batch write inside of an operator that counts no version of fakes."""


def plain_name(tensor: torch.Tensor) -> str:
    """Name of a plain tensor, whichever attributes hold it."""
    return f"tensor {id(tensor)}"


def _ended(
    number: int, written: Mapping[str, torch.Tensor], is_last: bool
) -> dict[str, torch.Tensor]:
    """What a call has written, and what the next one finds in its place."""
    found: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, tensor in written.items():
            found[of_call(number, ENDS + name)] = tensor.clone()
            if not is_last:
                anew = torch.empty_like(tensor)
                tensor.copy_(anew)
                found[of_call(number + 1, BEGINS + name)] = anew
    return found


@contextmanager
def _written_buffers(model: nn.Module) -> Iterator[None]:
    """Write into a buffer where the model assigns a new tensor of its shape to it."""
    before = Snapshot.of_buffers(model)
    yield
    for left in before.changes():
        old, new = left.old, left.new
        if all(isinstance(t, torch.Tensor) for t in (old, new)) and new.shape == old.shape:
            old.copy_(new.detach())
            left.put(old)


@contextmanager
def _tables_anew(model: nn.Module, remade: set[str]) -> Iterator[None]:
    """Forget what a model assigns to a buffer that had another shape, or was None.

    It is a table for that shape: each run computes its own.
    """
    before = Snapshot.of_buffers(model)
    yield
    for left in before.changes():
        if left.old is not MISSING:
            remade.add(f"{left.place.label}.{left.key}".removeprefix("."))
            left.put(left.old)


def refuse_growing(program: torch.export.ExportedProgram, remade: set[str]) -> None:
    """Refuse a table of another shape in each run that is read as the run before has left it.

    Args:
        program: as exported.
        remade: as of `Run`.

    Raises:
        TraceError: one is.
    """
    read = {node.name for node in program.graph.find_nodes(op="placeholder") if node.users}
    for spec in program.graph_signature.input_specs:
        name = (spec.target or "").removeprefix("model.")
        if name in remade and getattr(spec.arg, "name", "") in read:
            raise TraceError(
                f"the buffer {name} is read, and then gets another shape, so that no two steps "
                "are alike; let it keep its shape."
            )
