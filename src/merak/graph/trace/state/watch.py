"""Watch over Python state: which values that a graph has as constants are others now."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from merak.core.source_lines import with_text
from merak.graph.ir.state_read import GLOBALS, MODEL, StateRead
from merak.graph.trace.state.kept import KeptTensor, is_same, kept, shown
from merak.graph.trace.state.modules import ModuleWatch
from merak.graph.trace.state.outside import LASTING, Outside
from merak.graph.trace.state.places import Place
from merak.graph.trace.state.slots import Slot


@dataclass(frozen=True, slots=True)
class StateChange:
    """A value that is another one than a trace had.

    Args:
        label: its place, as people write it.
        old: the value that the trace had, as of `kept`.
        new: the value now.
        slot: by which it can be set; None for a setting of torch.
    """

    label: str
    old: Any
    new: Any
    slot: Slot | None

    def __str__(self) -> str:
        old, new = shown(self.old), shown(self.new)
        if old == new:
            return f"{self.label} is another now than when the model was traced ({new})"
        return f"{self.label} has changed from {old} to {new}"

    @property
    def is_number(self) -> bool:
        """Whether a number has become another number; booleans are none."""
        return self.slot is not None and {type(self.old), type(self.new)} <= {float, int}

    @property
    def is_tensor(self) -> bool:
        """Whether a plain tensor has become another one."""
        return isinstance(self.old, KeptTensor) and type(self.new) is torch.Tensor

    @property
    def has_weights(self) -> bool:
        """Whether it is a parameter, or a module with parameters or buffers, or was one."""
        return any(
            (issubclass(type(value), torch.Tensor) and isinstance(value, nn.Parameter))
            or (issubclass(type(value), nn.Module) and any(True for _ in value.parameters()))
            or (issubclass(type(value), nn.Module) and any(True for _ in value.buffers()))
            for value in (self.old, self.new)
        )

    @property
    def where(self) -> str:
        """The line that read it, with its text, to be put behind `read`; empty where it is none."""
        return (
            f" at {with_text(self.slot.read.source)}" if self.slot and self.slot.read.source else ""
        )


class StateWatch:
    """The values that a model's graphs have as constants.

    Args:
        model: the model.
        loss_fn: its loss function; None for none.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        self._model = model
        self._loss_fn = loss_fn
        self._known: dict[str, tuple[Slot, Any]] = {}
        self._modules = ModuleWatch(model)
        self._settings = _settings()

    def __len__(self) -> int:
        return len(self._known)

    def add(self, reads: Iterable[StateRead]) -> None:
        """Watch what a trace has just read, with the values of now."""
        for read in reads:
            if str(read) in self._known:
                continue
            try:
                slot = Slot(read, self._model, self._loss_fn)
            except LookupError:
                continue
            self._known[slot.label] = slot, kept(slot.get())

    def remove(self, label: str) -> None:
        """Watch a value no more, which has become an input of the graph."""
        self._known.pop(label, None)

    def changes(self) -> list[StateChange]:
        """The values that are others now than those that are known."""
        found = []
        for slot, old in self._known.values():
            new = slot.get()
            if new is not old and not is_same(old, new):
                found.append(StateChange(slot.label, old, new, slot))
        for read, old, new in self._modules.changes():
            slot = Slot(read, self._model, self._loss_fn)
            found.append(StateChange(slot.label, old, new, slot))
        same = self._settings.items == LASTING.now()
        for left in () if same else self._settings.changes():
            found.append(StateChange(str(left), left.old, left.new, None))
        return found

    def accept(self, changes: Iterable[StateChange]) -> None:
        """Know the values that some places have now."""
        self._modules, self._settings = ModuleWatch(self._model), _settings()
        for change in changes:
            if change.slot is not None and change.label in self._known:
                self._known[change.label] = change.slot, kept(change.new)
            elif change.slot is not None and issubclass(type(change.old), nn.Module):
                self._forget(change.slot.read)

    def _forget(self, child: StateRead) -> None:
        """Know no more what a module has read whose place another one has taken."""
        path = f"{child.path}.{child.steps[0]}.".lstrip(".")
        self._known = {
            label: (slot, value)
            for label, (slot, value) in self._known.items()
            if slot.read.root != MODEL or not f"{slot.read.path}.".startswith(path)
        }


def _settings() -> Place:
    return Place("", LASTING, LASTING.now(), Outside, GLOBALS)
