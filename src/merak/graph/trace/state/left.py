"""Python state that a call of a model has changed, in words."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from merak.core.source_lines import with_text
from merak.graph.ir.state_read import LOSS
from merak.graph.trace.state.outside import SETTINGS
from merak.graph.trace.state.places import CONTAINER_KINDS, StateLeft
from merak.graph.trace.state.record import StateReads

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
"""Types of numbers that a forward takes of a tensor, as `.item()` does."""


@dataclass(frozen=True, slots=True)
class LeftState:
    """A place that a call of a model has left another value in.

    Args:
        label: the place, as people write it.
        container: the list, dict or set that it is in, and its type; empty for none.
        line: of the model, as "file:number", which writes it or, of a container, reads it; empty
            where none is known.
        may_be_read: whether code may read it.
        is_number: whether a number has become another number.
        is_lost: whether it is a number that forward has computed, or, of the loss function's
            object, a tensor: a trace has no value of it.
        is_setting: whether it is a setting of torch.
        has_weights: whether it is a parameter, or a module with parameters, that forward has made.
        is_replayed: whether every step leaves it, as the loss runs again after it.
    """

    label: str
    container: tuple[str, str]
    line: str
    may_be_read: bool
    is_number: bool
    is_lost: bool
    is_setting: bool
    has_weights: bool
    is_replayed: bool = False

    @staticmethod
    def of(left: StateLeft, reads: StateReads, replays: bool = False) -> LeftState:
        """Text of the state that a forward leaves behind.

        Args:
            left: as of a snapshot.
            reads: of the trace.
            replays: whether the loss runs again after every step.
        """
        kind = left.place.kind
        held = issubclass(kind, CONTAINER_KINDS)
        return LeftState(
            str(left),
            (left.place.label, type(left.place.owner).__name__) if held else ("", ""),
            reads.line(left),
            reads.may_have_read(left),
            _is_number(reads.before(left)) and _is_number(left.new),
            isinstance(left.new, _SYMBOLS)
            or (left.place.root == LOSS and isinstance(left.new, torch.Tensor)),
            left.place.owner is SETTINGS,
            reads.makes_weights(left),
            replays and left.place.root == LOSS,
        )

    @property
    def where(self) -> str:
        """The line with its text, to be put behind a place."""
        return f", at {with_text(self.line)}" if self.line else ""


def _is_number(value: object) -> bool:
    return type(value) in (int, float)
