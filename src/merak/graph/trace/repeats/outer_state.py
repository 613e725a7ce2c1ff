"""State that a block's call may depend on beside the block and its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack

from merak.graph.trace.repeats.block import is_constant
from merak.graph.trace.state.functions import function_reads
from merak.graph.trace.state.holders import Holder, attributes
from merak.graph.trace.state.slots import Slot, slots_of
from merak.graph.trace.state.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class OuterState:
    """Objects that modules share, such as configs, and globals that their code reads.

    Args:
        shared: each object, by the identity of its attributes.
        slots: of globals and closures.
    """

    shared: Mapping[int, Any]
    slots: tuple[Slot, ...]

    @staticmethod
    def of(
        model: nn.Module, loss_fn: Callable[..., Any] | None, holders: Mapping[int, Holder]
    ) -> OuterState:
        """OuterState of the blocks of a model.

        Args:
            model: the model.
            loss_fn: its loss function; None for none.
            holders: modules and the objects that they hold, by the identity of their attributes.
        """
        shared = {
            key: holder.value
            for key, holder in holders.items()
            if not isinstance(holder.value, nn.Module)
        }
        slots = tuple(slots_of(function_reads(model, loss_fn), model, loss_fn))
        found = OuterState(shared, slots)
        while opaque := [k for k, one in shared.items() if not found._holds_all(one)]:
            for key in opaque:
                del shared[key]
        return found

    def _holds_all(self, value: Any) -> bool:
        return all(map(self.holds, attributes(value).values()))

    def holds(self, value: Any) -> bool:
        """Whether a value is a constant, or an object all of whose attributes are looked at."""
        if is_constant(value):
            return True
        try:
            return id(attributes(value)) in self.shared
        except AttributeError:
            return False

    def now(self) -> Snapshot:
        """Snapshot of them, and of torch's settings."""
        return Snapshot.of_values(self.shared.values(), self.slots)


def following_modes() -> list[Callable[[torch.Tensor], bool]]:
    """Function modes that follow tensors: whether each knows more of one tensor than others do."""
    every = (getattr(mode, "follows", None) for mode in _get_current_function_mode_stack())
    return [follows for follows in every if follows is not None]
