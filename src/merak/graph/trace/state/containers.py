"""Lists and dicts of modules, whose tensors forward may replace, write into, or add to."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from merak.core.rank0 import warn_on_rank0

logger = logging.getLogger(__name__)

_OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes that every module has, which torch keeps itself."""


@dataclass(frozen=True, slots=True, eq=False)
class ContainerBefore:
    """A list, deque or dict of a module, before a trace.

    Args:
        label: the attribute, as people write it.
        container: the object itself.
        items: what it had then, by index or key.
    """

    label: str
    container: Any
    items: dict[Any, Any]

    @property
    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that it had then, with their labels."""
        for key, value in self.items.items():
            if isinstance(value, torch.Tensor):
                yield f"{self.label}[{key!r}]", value

    def replaced(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Those of its tensors that it has no longer in their places."""
        now = _items(self.container)
        for label, tensor in self.tensors:
            if not any(tensor is value for value in now.values()):
                yield label, tensor

    def has_new(self) -> bool:
        """Whether it has tensors that it had not then."""
        old = {id(value) for value in self.items.values()}
        found = _items(self.container).values()
        return any(isinstance(value, torch.Tensor) and id(value) not in old for value in found)

    def restore(self) -> None:
        """Put back what it had, where tensors have come or gone."""
        if not self.has_new() and not any(True for _ in self.replaced()):
            return
        self.container.clear()
        if isinstance(self.container, dict):
            self.container.update(self.items)
        else:
            self.container.extend(self.items.values())


def containers_of(model: nn.Module) -> list[ContainerBefore]:
    """The lists, deques and dicts in attributes of a model's modules, as they are now.

    Args:
        model: the model.
    """
    found = []
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in _OF_TORCH and isinstance(value, (list, deque, dict)):
                label = f"{path}.{name}".removeprefix(".")
                found.append(ContainerBefore(label, value, _items(value)))
    return found


def warn_of_kept(containers: Sequence[ContainerBefore]) -> None:
    """Warn of tensors that forward adds to lists and dicts, which steps of a graph do not.

    Args:
        containers: as they were before forward.
    """
    for one in containers:
        if one.has_new() and not any(True for _ in one.replaced()):  # else refused, where read
            warn_on_rank0(
                logger,
                "forward keeps tensors in %s, a %s, which stays as it was before training: a trace "
                "adds nothing to it, and a step that reads it would find what the first one finds. "
                "If the model reads there what earlier steps have kept, use register_buffer.",
                one.label,
                type(one.container).__name__,
            )


def _items(container: Any) -> dict[Any, Any]:
    return dict(container) if isinstance(container, dict) else dict(enumerate(container))
