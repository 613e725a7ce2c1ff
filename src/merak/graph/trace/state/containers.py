"""Lists and dicts that a model's code reads, whose items it may replace, write into, or add to."""

from __future__ import annotations

import copy
import logging
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from merak.core.rank0 import warn_on_rank0
from merak.core.source_lines import is_installed
from merak.graph.ir.state_read import GLOBALS, LOSS, MODEL, StateRead
from merak.graph.trace.state.functions import function_reads, functions_of
from merak.graph.trace.state.holders import Holder, attributes, closure, label_of, loss_holders
from merak.graph.trace.state.modules import line_of
from merak.graph.trace.state.slots import is_plain, slots_of

logger = logging.getLogger(__name__)

_OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes that every module has, which torch keeps itself."""
_KINDS = (list, deque, dict)
_MAX_DEPTH, _MAX_ITEMS = 3, 1000


@dataclass(frozen=True, slots=True)
class _Place:
    """A place of a container, and what is there now."""

    read: StateRead
    get: Callable[[], Any]


@dataclass(frozen=True, slots=True, eq=False)
class ContainerBefore:
    """A list, deque or dict of a module, a global or a closure, before a trace.

    Args:
        label: the attribute, as people write it.
        container: the object itself.
        items: what it had then, by index or key.
        inner: the containers among its items.
        place: where the model's code finds it; None for an inner one.
    """

    label: str
    container: Any
    items: dict[Any, Any]
    inner: tuple[ContainerBefore, ...] = ()
    place: _Place | None = None

    @property
    def is_of_loss(self) -> bool:
        """Whether the loss function's object has it, whose code runs behind the model's forward."""
        return self.place is not None and self.place.read.root == LOSS

    @property
    def is_shared(self) -> bool:
        """Whether it is a global or a variable of a closure."""
        read = None if self.place is None else self.place.read
        return read is not None and (read.root == GLOBALS or read.steps[-1].startswith("("))

    @property
    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that it had then, with their labels."""
        for key, value in self.items.items():
            if isinstance(value, torch.Tensor):
                yield f"{self.label}[{key!r}]", value
        for one in self.inner:
            yield from one.tensors

    def replaced(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Those of its tensors that it has no longer in their places."""
        now = _items(self.container)
        for key, value in self.items.items():
            if isinstance(value, torch.Tensor) and not any(value is one for one in now.values()):
                yield f"{self.label}[{key!r}]", value
        for one in self.inner:
            yield from one.replaced()

    def has_new(self) -> bool:
        """Whether it has tensors or plain values that it had not then."""
        old = {id(value) for value in self.items.values()}
        found = [value for value in _items(self.container).values() if id(value) not in old]
        plain = [value for value in self.items.values() if is_plain(value)]
        return any(one.has_new() for one in self.inner) or any(
            isinstance(value, (torch.Tensor, *_KINDS)) or (is_plain(value) and value not in plain)
            for value in found
        )

    def restore(self) -> None:
        """Put back what it had."""
        for one in self.inner:
            one.restore()
        if not _are_same(self.items, _items(self.container)):
            _fill(self.container, self.items)

    def left(self, line: str) -> LeftContainer | None:
        """What forward has left in it, once it has run; None where that is what it had.

        Args:
            line: of the model, which reads the attribute first; empty where it is not known.
        """
        assert self.place is not None
        now, where = self.place.get(), str(self.place.read)
        line = line or self.place.read.source
        if type(now) is not type(self.container):
            return None
        known = {id(tensor) for _, tensor in self.tensors}
        is_same = _are_same(self.items, _items(now))
        if is_same and not any(_is_changed(one) for one in self.inner):
            return None
        try:
            items = {key: _placed(value, known) for key, value in _items(now).items()}
        except Exception:  # of sizes that are symbols
            return None
        is_replaced = any(True for _ in self.replaced())
        is_added_to = now is self.container and self.has_new() and not is_replaced
        return LeftContainer(self.label, self.container, items, line, is_added_to, where)


@dataclass(frozen=True, slots=True, eq=False)
class LeftContainer:
    """A list, deque or dict of a module that forward has changed.

    Args:
        label: the attribute, as people write it.
        container: the object itself.
        items: what forward has left in it, with functions that make zeros for new tensors.
        line: of the model, which reads it first; empty where it is not known.
        is_added_to: whether it is the object that it was, and has values that it had not.
        where: the attribute, with the model or loss function that has it.
    """

    label: str
    container: Any
    items: Mapping[Any, Any]
    line: str
    is_added_to: bool
    where: str

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context in which the container has what forward has left in it."""
        before = _items(self.container)
        _fill(self.container, {key: _made(value) for key, value in self.items.items()})
        try:
            yield
        finally:
            _fill(self.container, before)


def containers_of(
    model: nn.Module, loss_fn: Callable[..., Any] | None = None
) -> list[ContainerBefore]:
    """The lists, deques and dicts that the model's code may read, as they are now.

    They are attributes of modules and of a loss's object, or globals and variables of closures.

    Args:
        model: the model.
        loss_fn: its loss function, such as a method of a trainer; None for none.
    """
    modules = [Holder(module, MODEL, path) for path, module in model.named_modules()]
    own = [
        _before(label_of(holder, name), value, _Place(_attribute(holder, name), get))
        for holder in [*modules, *loss_holders(loss_fn)]
        for name, value in attributes(holder.value).items()
        if name not in _OF_TORCH and _is_followed(value)
        for get in [partial(attributes(holder.value).get, name)]
    ]
    own += _of_hooks(model)
    return own + [
        _before(slot.label, slot.get(), _Place(slot.read, slot.get))
        for slot in slots_of(function_reads(model, loss_fn), model, loss_fn)
        if _is_followed(slot.get())
    ]


def _of_hooks(model: nn.Module) -> Iterator[ContainerBefore]:
    """Containers of the objects, and in the closures, of hooks around modules' forwards."""
    hooks = [
        (path, hook)
        for path, module in model.named_modules()
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        if not is_installed(_line_of_hook(hook).rpartition(":")[0] or "<built in>")
    ]
    seen: set[int] = set()
    for path, hook in hooks:
        for name, value in _held_by_hook(hook):
            if _is_followed(value) and id(value) not in seen:
                seen.add(id(value))
                label = f"{name} of a hook of {path or 'the model'}"
                read = StateRead(MODEL, path, (f"{name} of a hook",), _line_of_hook(hook))
                yield _before(label, value, _Place(read, partial(_itself, value)))


def _line_of_hook(hook: Any) -> str:
    while isinstance(hook, partial):
        hook = hook.func
    is_object = not isinstance(hook, (types.FunctionType, types.MethodType))
    return line_of(type(hook).__call__ if is_object else hook)


def _itself(value: Any) -> Any:
    return value


def _held_by_hook(hook: Any) -> Iterator[tuple[str, Any]]:
    for holder in loss_holders(hook):
        for name, value in attributes(holder.value).items():
            yield f"{type(holder.value).__name__}.{name}", value
    for _, function in functions_of(hook, ()):
        yield from closure(function).items()


def _attribute(holder: Holder, name: str) -> StateRead:
    return StateRead(holder.root, holder.path, (*holder.steps, name), "")


def _is_followed(value: Any) -> bool:
    return isinstance(value, _KINDS) and len(value) <= _MAX_ITEMS


def warn_of_kept(containers: Iterable[LeftContainer]) -> None:
    """Warn of what forward adds to lists and dicts, which steps of a graph do not.

    Args:
        containers: that forward has changed, and does not compute with.
    """
    for one in containers:
        if one.is_added_to:  # else refused, where read
            warn_on_rank0(
                logger,
                "forward keeps values in %s, a %s, which stays as it was before training: a trace "
                "adds nothing to it. A callback that reads there what steps have kept finds "
                "nothing; use register_buffer, and write into it in place.",
                one.label,
                type(one.container).__name__,
            )


def _before(label: str, value: Any, place: _Place | None = None, depth: int = 1) -> ContainerBefore:
    items = _items(value)
    inner = tuple(
        _before(f"{label}[{key!r}]", one, depth=depth + 1)
        for key, one in items.items()
        if isinstance(one, _KINDS) and depth < _MAX_DEPTH and len(one) <= _MAX_ITEMS
    )
    return ContainerBefore(label, value, items, inner, place)


def _is_changed(one: ContainerBefore) -> bool:
    own = not _are_same(one.items, _items(one.container))
    return own or any(_is_changed(inner) for inner in one.inner)


def _are_same(before: Mapping[Any, Any], now: Mapping[Any, Any]) -> bool:
    """Whether two sets of items are the same objects, or equal plain values, in one order."""
    return list(before) == list(now) and all(
        old is new or (is_plain(old) and is_plain(new) and old == new)
        for old, new in zip(before.values(), now.values(), strict=True)
    )


def _placed(value: Any, known: set[int]) -> Any:
    """A value that forward has left, with a function in the place of a tensor of the trace."""
    if isinstance(value, torch.Tensor):
        if id(value) in known:
            return value
        shape = tuple(int(size) for size in value.shape)
        # Made later: the trace that runs now would make a tensor of its own.
        return partial(torch.zeros, shape, dtype=value.dtype, device=value.device)
    if not isinstance(value, _KINDS):
        return value
    copied = copy.copy(value)
    _fill(copied, {key: _placed(one, known) for key, one in _items(value).items()})
    return copied


def _made(value: Any) -> Any:
    """A value that was placed, with real zeros."""
    if isinstance(value, partial) and value.func is torch.zeros:
        return value()
    if isinstance(value, _KINDS):
        _fill(value, {key: _made(one) for key, one in _items(value).items()})
    return value


def _fill(container: Any, items: Mapping[Any, Any]) -> None:
    container.clear()
    if isinstance(container, dict):
        container.update(items)
    else:
        container.extend(items.values())


def _items(container: Any) -> dict[Any, Any]:
    return dict(container) if isinstance(container, dict) else dict(enumerate(container))
