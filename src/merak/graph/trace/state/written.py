"""Plain tensors that forward replaces or writes into.

They are in attributes of modules, in lists and dicts there, in globals and in closures.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from merak.graph.trace.state.containers import ContainerBefore, LeftContainer, containers_of
from merak.graph.trace.state.functions import function_reads
from merak.graph.trace.state.kept import version
from merak.graph.trace.state.record import StateReads
from merak.graph.trace.state.slots import Slot, slots_of


@contextmanager
def plain_tensors_stay(
    model: nn.Module, reads: StateReads, replaced: dict[int, str], left: dict[str, LeftContainer]
) -> Iterator[None]:
    """Leave plain tensors of modules as they were before a trace, and find replaced ones.

    What forward writes into a tensor of a module is an operator of the graph; the trace itself may
    have written it once, which is undone at the end.

    Args:
        model: the model.
        reads: of the trace, with the lines that read lists and dicts.
        replaced: names of the old tensors' attributes, by identity; filled when forward has run. If
            the graph reads one as a constant, the model changes a plain attribute from step to
            step, which a trace would freeze. Globals and closures that are written are among them.
        left: lists and dicts of modules that forward has changed, by their labels; filled likewise.
    """
    own = [
        (f"{path}.{name}".removeprefix("."), module, name, value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    ]
    containers = containers_of(model, reads.loss_fn)
    written = [_Before(value, version(value), _copy(value)) for _, _, _, value in own]
    written += [_Before(t, version(t), _copy(t)) for one in containers for _, t in one.tensors]
    shared = [(slot.label, value, version(value)) for slot, value in _shared(model, reads.loss_fn)]
    shared += [(n, t, version(t)) for one in containers if one.is_shared for n, t in one.tensors]

    def note_left(changed: Iterable[ContainerBefore]) -> None:
        found = [one.left(reads.lines.get(one.label, "")) for one in changed]
        left.update((one.label, one) for one in found if one is not None)

    def note(*_: Any) -> None:
        for label, module, name, value in own:
            if vars(module).get(name) is not value:
                replaced[id(value)] = label
        for one in containers:
            replaced.update((id(tensor), label) for label, tensor in one.replaced())
        note_left(containers)
        replaced.update((id(t), label) for label, t, known in shared if version(t) != known)

    handle = model.register_forward_hook(note)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assigned during export")
        try:
            yield
            note_left(one for one in containers if one.is_of_loss)
        finally:
            handle.remove()
            for container in containers:
                container.restore()
            for tensor in written:
                tensor.restore()


@dataclass(frozen=True, slots=True, eq=False)
class _Before:
    """A plain tensor of a module before a trace."""

    tensor: torch.Tensor
    version: int
    values: torch.Tensor | None

    def restore(self) -> None:
        if self.values is not None and version(self.tensor) != self.version:
            with torch.no_grad():
                self.tensor.copy_(self.values)


def _copy(tensor: torch.Tensor) -> torch.Tensor | None:
    return None if tensor.is_meta or tensor.is_inference() else tensor.detach().clone()


def _shared(
    model: nn.Module, loss_fn: Callable[..., Any] | None
) -> Iterator[tuple[Slot, torch.Tensor]]:
    for slot in slots_of(function_reads(model, loss_fn), model, loss_fn):
        value = slot.get()
        if type(value) is torch.Tensor:
            yield slot, value
