"""Slots: the places that Python state is read from, by which it can be read and set again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from inspect import getattr_static
from typing import Any, TypeGuard

import torch
from torch import nn

from merak.graph.ir.state_read import CONTEXT, GLOBALS, MODEL, StateRead

PLAIN = (bool, int, float, str, type(None))
"""Types of state whose values are compared."""

MISSING = object()
"""Value of a slot that is not there any more."""

_LARGEST = 64


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, None, or a small list or tuple of these."""
    if type(value) in PLAIN:
        return True
    return (
        type(value) in (list, tuple)
        and len(value) <= _LARGEST
        and all(type(item) in PLAIN for item in value)
    )


def is_plain_dict(value: Any) -> TypeGuard[dict[str, Any]]:
    """Whether a value is a small dict from texts to plain values."""
    return (
        type(value) is dict
        and 0 < len(value) <= _LARGEST
        and all(type(key) is str and is_plain(item) for key, item in value.items())
    )


class Slot:
    """The place of a plain value.

    Args:
        read: which one.
        model: the model that it is read in.
        loss_fn: the loss function that is called after it; None for none.

    Raises:
        LookupError: there is no such place.
    """

    def __init__(
        self, read: StateRead, model: nn.Module, loss_fn: Callable[..., Any] | None
    ) -> None:
        self.read = read
        self.label = str(read)
        *self._steps, self._last = read.steps
        self._is_attribute = self._last != CONTEXT and self._last[0] not in "[("
        try:
            self._root = _root(read, model, loss_fn)
            self._container()
            is_of_root = self._is_attribute and not self._steps
            # Looked at in each step, by a call without Python code of its own where it can be.
            self._get = partial(getattr, self._root, self._last) if is_of_root else self._found
        except Exception as error:
            raise LookupError(self.label) from error

    def get(self) -> Any:
        """The value now; `MISSING` where there is none."""
        try:
            return self._get()
        except Exception:  # whatever the user's own attributes raise
            return MISSING

    def _found(self) -> Any:
        found = self._container()
        return getattr(found, self._last) if self._is_attribute else _step(found, self._last)

    def set(self, value: Any) -> None:
        """Set the value, or remove it where it is `MISSING`."""
        container, step = self._container(), self._last
        if step.startswith("["):
            container[_key(container, step)] = value
        elif step.startswith("("):
            _cell(container, step[1:-1]).cell_contents = value
        elif step == CONTEXT:
            container.set(value)
        elif value is MISSING:
            delattr(container, step)
        else:
            setattr(container, step, value)

    def own(self) -> Any:
        """The value that the place itself holds; `MISSING` where a class or nothing has it."""
        container, step = self._container(), self._last
        if step.startswith(("[", "(")) or step == CONTEXT:
            return self.get()
        return vars(container).get(step, MISSING)

    def attributes(self) -> dict[str, Any] | None:
        """Attributes of the root, where these hold the value and no code of a class gives it."""
        if not self._is_attribute or self._steps:
            return None
        own: dict[str, Any] = getattr(self._root, "__dict__", {})
        of_class = getattr_static(type(self._root), self._last, None)
        return own if self._last in own and not hasattr(of_class, "__set__") else None

    def _container(self) -> Any:
        found = self._root
        for step in self._steps:
            found = _step(found, step)
        return found


def slots_of(
    reads: Iterable[StateRead], model: nn.Module, loss_fn: Callable[..., Any] | None
) -> Iterator[Slot]:
    """The places of reads, without those that are not there."""
    for read in reads:
        with suppress(LookupError):
            yield Slot(read, model, loss_fn)


def _root(read: StateRead, model: nn.Module, loss_fn: Callable[..., Any] | None) -> Any:
    if read.root == MODEL:
        return model.get_submodule(read.path)
    return vars(sys.modules[read.path]) if read.root == GLOBALS else loss_fn


def _step(value: Any, step: str) -> Any:
    if step.startswith("["):
        return value[_key(value, step)]
    if step.startswith("("):
        return _cell(value, step[1:-1]).cell_contents
    return value.get() if step == CONTEXT else getattr(value, step)


def _key(container: Any, step: str) -> Any:
    return int(step[1:-1]) if type(container) is list else step[1:-1]


def _cell(function: Any, name: str) -> Any:
    return function.__closure__[function.__code__.co_freevars.index(name)]


@contextmanager
def numbers_as_inputs(
    batch: dict[str, torch.Tensor], numbers: Mapping[str, Slot]
) -> Iterator[dict[str, torch.Tensor]]:
    """Context in which slots hold tensors of a batch in place of their numbers.

    Args:
        batch: tensors by column, also of the numbers.
        numbers: the slots by column.

    Yields:
        The batch without these columns.
    """
    with ExitStack() as stack:
        for column, slot in numbers.items():
            if column in batch:
                stack.callback(slot.set, slot.own())
                slot.set(batch[column])
        yield {name: value for name, value in batch.items() if name not in numbers}
