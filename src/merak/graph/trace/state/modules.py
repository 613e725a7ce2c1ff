"""Code of a model's modules: forwards, hooks and children that a script replaces later."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from merak.graph.trace.state.slots import MISSING

T = TypeVar("T")

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@dataclass(frozen=True, slots=True, eq=False)
class Code:
    """The code of a module, as the owner of a place.

    Args:
        usual: the class's `forward`, which may be another one later.
        own: the module's attributes.
        forward: its own `forward` as it was.
        children: as they were.
        is_hooked: whether it had hooks.
    """

    usual: Callable[[], Any]
    own: dict[str, Any]
    forward: Any
    children: list[nn.Module | None]
    is_hooked: bool

    @staticmethod
    def of(module: nn.Module) -> Code:
        """Code of a module as it is."""
        own = vars(module)
        forward, children = own.get("forward", MISSING), [*own["_modules"].values()]
        is_hooked = any(_own_hooks(own[kind]) for kind in _HOOKS)
        return Code(lambda: type(module).forward, own, forward, children, is_hooked)

    def now(self) -> dict[str, Any]:
        """Current forward, children and hooks of a module, by name."""
        own = self.own
        hooks = {kind: _own_hooks(own[kind]) for kind in _HOOKS}
        names = tuple(own["_modules"])  # whose order counts
        forward = own.get("forward", self.usual())
        return {"forward": forward, "_modules": names, **own["_modules"], **hooks}


@dataclass(frozen=True, slots=True, eq=False)
class CodeOfClass:
    """The code of a class of modules, as the owner of a place.

    Args:
        cls: the class.
        forward: as it was.
    """

    cls: type[nn.Module]
    forward: Any

    def now(self) -> dict[str, Any]:
        """Forward as it is, by name."""
        return {"forward": self.cls.forward}

    def seems_same(self) -> bool:
        """Whether nothing has changed."""
        return self.cls.forward is self.forward


def glance_at(codes: Mapping[T, Code]) -> Callable[[], list[T]]:
    """Make a function that tells which codes may have changed: those that are hooked, or seem so.

    Models have 50,000 modules, so that it looks at all of them in one loop without calls.

    Args:
        codes: as they were, each by what is to be told of it.
    """
    rows = [(k, c.own, c.forward, c.children, c.is_hooked) for k, c in codes.items()]
    return lambda: [
        key
        for key, own, forward, children, is_hooked in rows
        if own.get("forward", MISSING) is not forward
        or ((children or own["_modules"]) and [*own["_modules"].values()] != children)
        or is_hooked
        or own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
    ]


def line_of(function: Any) -> str:
    """The line that a function begins at, as "file:number"; "" where it is not in Python."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if isinstance(code, types.CodeType) else ""


def _own_hooks(hooks: dict[int, Any]) -> tuple[Any, ...]:
    """Hooks but for those of transformers, which catch outputs where these are asked for."""
    return tuple(
        hook
        for hook in hooks.values()
        if not str(getattr(hook, "__module__", "")).startswith("transformers.utils.")
    )
