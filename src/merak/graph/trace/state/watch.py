"""Watch over Python state: which values that a graph has as constants are others now."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from merak.core.source_lines import with_text
from merak.graph.ir.state_read import StateRead
from merak.graph.trace.state.slots import MISSING, Slot


@dataclass(frozen=True, slots=True)
class StateChange:
    """A value that is another one than a trace had.

    Args:
        slot: its place.
        old: the value that the trace had.
        new: the value now.
    """

    slot: Slot
    old: Any
    new: Any

    def __str__(self) -> str:
        new = "nothing" if self.new is MISSING else repr(self.new)
        return f"{self.slot.label} has changed from {self.old!r} to {new}"

    @property
    def is_number(self) -> bool:
        """Whether a number with a fraction has become another number."""
        return type(self.old) is float and type(self.new) in (float, int)

    def line(self) -> str:
        """The line that read it, with its text."""
        return with_text(self.slot.read.source)


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
            value = slot.get()
            if value is not MISSING:
                self._known[slot.label] = slot, _kept(value)

    def remove(self, label: str) -> None:
        """Watch a value no more, which has become an input of the graph."""
        self._known.pop(label, None)

    def changes(self) -> list[StateChange]:
        """The values that are others now than those that are known."""
        found = []
        for slot, old in self._known.values():
            new = slot.get()
            if new is not old and not _equal(old, new):
                found.append(StateChange(slot, old, new))
        return found

    def accept(self, changes: Iterable[StateChange]) -> None:
        """Know the values that some places have now."""
        for change in changes:
            self._known[change.slot.label] = change.slot, _kept(change.new)


def _kept(value: Any) -> Any:
    """The value as it is now: of a list, a copy."""
    return list(value) if type(value) is list else value


def _equal(old: Any, new: Any) -> bool:
    if type(old) is not type(new):
        return False
    try:
        return bool(old == new) or (old != old and new != new)
    except Exception:  # of an object that cannot be compared
        return False
