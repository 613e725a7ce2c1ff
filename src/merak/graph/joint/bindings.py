"""Python bindings of operators, which cost less to call than `torch.ops`.

A binding is taken where a call of it has been seen to reach the same overload with the same
arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from merak.graph.joint.derive import Layout

_FUNCTIONS = (torch._C._VariableFunctions, torch._C._nn)

_KNOWN: dict[Any, Callable[..., Any]] = {}


def binding(node: fx.Node) -> Callable[..., Any]:
    """Function that calls the operator of a node of a joint graph, with the node's arguments."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return target  # type: ignore[return-value]
    key = (target, _pattern(node.args), _pattern(node.kwargs))
    if key not in _KNOWN:
        _KNOWN[key] = _find(target, node)
    return _KNOWN[key]


def _pattern(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(map(_pattern, value))
    if isinstance(value, Mapping):
        return tuple((name, _pattern(one)) for name, one in value.items())
    return type(value)


def _find(target: torch._ops.OpOverload, node: fx.Node) -> Callable[..., Any]:
    fallback: Callable[..., Any] = target._op
    if target.namespace != "aten":
        return fallback
    name = target._schema.name.removeprefix("aten::")
    is_method = target._schema.arguments[0].name == "self" if target._schema.arguments else False
    holders = (*_FUNCTIONS, torch._C.TensorBase) if is_method else _FUNCTIONS
    candidates = [getattr(holder, name) for holder in holders if hasattr(holder, name)]
    with FakeTensorMode(), torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        args: Any = fx.map_arg(node.args, _fake)
        kwargs: Any = fx.map_arg(node.kwargs, _fake)
        for candidate in candidates:
            wanted = _Seen(target, args, kwargs)
            try:
                with wanted:
                    candidate(*args, **kwargs)
            except (RuntimeError, TypeError, NotImplementedError, ValueError, IndexError):
                continue
            if wanted.is_reached:
                return candidate  # type: ignore[no-any-return]
    return fallback


def _fake(node: fx.Node) -> torch.Tensor | int:
    layout: Layout | None = node.meta["layout"]
    if layout is None:
        number: int = node.meta["number"]
        return number
    return torch.empty_strided(
        layout.shape, layout.stride, dtype=layout.dtype, device=layout.device
    )


class _Seen(TorchDispatchMode):
    """Whether the first operator that is called is the wanted one."""

    def __init__(self, target: Any, args: Any, kwargs: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._wanted = (target, args, kwargs)
        self._calls = 0
        self.is_reached = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "prim":  # such as a question for the device
            self._calls += 1
            is_same = _is_same((func, args, kwargs or {}), self._wanted)
            self.is_reached = self._calls == 1 and is_same
        return func(*args, **(kwargs or {}))


def _is_same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, tuple | list):
        is_list = isinstance(found, tuple | list) and len(found) == len(wanted)
        return is_list and all(map(_is_same, found, wanted))
    if isinstance(wanted, Mapping):
        return found.keys() == wanted.keys() and all(_is_same(found[k], wanted[k]) for k in wanted)
    if isinstance(wanted, torch.Tensor):
        return found is wanted
    return type(found) is type(wanted) and bool(found == wanted)
