"""Code of a model's modules: forwards, hooks and children that a script replaces later."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from merak.graph.ir.state_read import MODEL, StateRead
from merak.graph.trace.state.slots import MISSING

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

_Change = tuple[StateRead, Any, Any]


@dataclass(frozen=True, slots=True)
class _Code:
    """The code of a module as it was: its path, itself, its attributes, and what they held."""

    path: str
    module: nn.Module
    own: dict[str, Any]
    forward: Any
    children: tuple[nn.Module | None, ...]
    hooks: tuple[tuple[Any, ...], ...]
    is_hooked: bool

    @classmethod
    def of(cls, path: str, module: nn.Module) -> _Code:
        own = vars(module)
        hooks = tuple(_own_hooks(own[kind]) for kind in _HOOKS)
        children = tuple(own["_modules"].values())
        return cls(path, module, own, own.get("forward", MISSING), children, hooks, any(hooks))

    def is_same(self) -> bool:
        """Whether nothing has changed, as far as a glance tells: models have 50,000 modules."""
        own = self.own
        return (
            own.get("forward", MISSING) is self.forward
            and tuple(own["_modules"].values()) == self.children
            and not (
                self.is_hooked
                or own["_forward_hooks"]
                or own["_forward_pre_hooks"]
                or own["_backward_hooks"]
                or own["_backward_pre_hooks"]
            )
        )

    def changes(self) -> Iterator[_Change]:
        """What is other code now."""
        path, module, own = self.path, self.module, self.own
        if own.get("forward", MISSING) is not self.forward:
            usual = type(module).forward
            old = usual if self.forward is MISSING else self.forward
            yield _read(path, module, "forward"), old, own.get("forward", usual)
        now = tuple(own["_modules"].values())
        if len(now) != len(self.children) or any(a is not b for a, b in zip(now, self.children)):
            yield from _children(path, module, self.children)
        for kind, hooks in zip(_HOOKS, self.hooks, strict=True):
            if _own_hooks(own[kind]) != hooks:
                yield _read(path, module, kind), hooks, _own_hooks(own[kind])


class ModuleWatch:
    """The code that a model's modules had.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.named_modules())
        self._known = [_Code.of(path, module) for path, module in modules]
        classes = {type(module): path for path, module in reversed(modules)}
        self._forwards = [(path, cls, cls.forward) for cls, path in classes.items()]

    def changes(self) -> Iterator[_Change]:
        """What is other code now: its place, the old value and the new one."""
        for code in self._known:
            if not code.is_same():
                yield from code.changes()
        for path, cls, forward in self._forwards:
            if cls.forward is not forward:
                yield StateRead(MODEL, path, ("forward",), line_of(forward)), forward, cls.forward


def line_of(function: Any) -> str:
    """The line that a function begins at, as "file:number"; "" where it is not in Python."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if isinstance(code, types.CodeType) else ""


def _read(path: str, module: nn.Module, name: str) -> StateRead:
    return StateRead(MODEL, path, (name,), line_of(type(module).forward))


def _children(
    path: str, module: nn.Module, children: tuple[nn.Module | None, ...]
) -> Iterator[_Change]:
    """The children that are others now; where their number is another, all of them."""
    now = list(module._modules.items())
    if len(now) != len(children):
        old, new = (nn.ModuleList(m for m in ms if m) for ms in (children, dict(now).values()))
        yield _read(path, module, "_modules"), old, new
        return
    for (name, new_child), old_child in zip(now, children, strict=True):
        if new_child is not old_child:
            yield _read(path, module, name), old_child, new_child


def _own_hooks(hooks: dict[int, Any]) -> tuple[Any, ...]:
    """Hooks but for those of transformers, which catch outputs where these are asked for."""
    return tuple(
        hook
        for hook in hooks.values()
        if not str(getattr(hook, "__module__", "")).startswith("transformers.utils.")
    )
