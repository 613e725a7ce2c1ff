"""Watch over Python state: which values that a graph has as constants are others now."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from merak.core.source_lines import with_text
from merak.graph.ir.state_read import MODEL, StateRead
from merak.graph.trace.state.kept import KeptTensor, shown
from merak.graph.trace.state.places import Place, StateLeft
from merak.graph.trace.state.slots import Slot, slots_of
from merak.graph.trace.state.snapshot import Snapshot


def sentence(change: StateLeft) -> str:
    """A change as a sentence without its end."""
    old, new = shown(change.old), shown(change.new)
    if old == new:
        return f"{change} is another now than when the model was traced ({new})"
    return f"{change} has changed from {old} to {new}"


def is_number(change: StateLeft) -> bool:
    """Whether a number has become another number; booleans are none."""
    return change.place.kind is Slot and {type(change.old), type(change.new)} <= {float, int}


def is_tensor(change: StateLeft) -> bool:
    """Whether a plain tensor has become another one."""
    return isinstance(change.old, KeptTensor) and type(change.new) is torch.Tensor


def has_weights(change: StateLeft) -> bool:
    """Whether it is a parameter, or a module with parameters or buffers, or was one."""
    values = [v for v in (change.old, change.new) if issubclass(type(v), (nn.Module, nn.Parameter))]
    return any(isinstance(v, nn.Parameter) or any(True for _ in _tensors(v)) for v in values)


def where(change: StateLeft) -> str:
    """The line that reads it, with its text, to be put behind `read`; empty where none is known."""
    return f" at {with_text(change.place.source)}" if change.place.source else ""


def _tensors(module: nn.Module) -> Iterable[torch.Tensor]:
    return (*module.parameters(), *module.buffers())


class StateWatch:
    """The values that a model's graphs have as constants.

    Args:
        model: the model.
        loss_fn: its loss function; None for none.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        self._model = model
        self._loss_fn = loss_fn
        self._read: dict[str, Place] = {}
        self._known: Snapshot | None = None  # of these; None where they are others since
        self._rest = Snapshot.between_steps(model)

    def __len__(self) -> int:
        return len(self._read)

    def add(self, reads: Iterable[StateRead]) -> None:
        """Watch what a trace has just read, with the values of now."""
        new = (read for read in reads if str(read) not in self._read)
        self._keep(slots_of(new, self._model, self._loss_fn))

    def _keep(self, slots: Iterable[Slot]) -> None:
        self._read |= {place.label: place for place in Snapshot.of_slots(slots).places}
        self._known = None

    def remove(self, label: str) -> None:
        """Watch a value no more, which has become an input of the graph."""
        self._read.pop(label, None)
        self._known = None

    def changes(self) -> list[StateLeft]:
        """The values that are others now than those that are known."""
        self._known = self._known or Snapshot.of_places(self._read.values())
        return [*self._known.changes(), *self._rest.changes()]

    def accept(self, changes: Iterable[StateLeft]) -> None:
        """Know the values that some places have now."""
        self._rest = Snapshot.between_steps(self._model)
        for change in changes:
            if change.place.kind is Slot and str(change) in self._read:
                self._keep([change.place.owner])
            elif issubclass(type(change.old), nn.Module):  # whose own attributes are of no use now
                inner = f"{change}."
                self._read = {
                    label: place
                    for label, place in self._read.items()
                    if place.root != MODEL or not label.startswith(inner)
                }
                self._known = None
