"""Autocast inside a model, written out as dtype conversions in its graph.

A trace records operators above autocast: their arguments still have the types the user gave, their
results already those that autocast makes. Run again under autocast on fake tensors, every operator
shows which arguments it converts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from merak.core.errors import TraceError

aten = torch.ops.aten

AUTOCAST_DONE = "settled"
"""In a node's meta: no autocast further out changes it."""


class _Conversions(TorchDispatchMode):
    """Notes which of some tensors autocast converts, and to which dtype."""

    def __init__(self, tensors: Mapping[int, fx.Node]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors = tensors
        self.found: dict[fx.Node, torch.dtype] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._to_copy.default and (node := self.tensors.get(id(args[0]))) is not None:
            self.found.setdefault(node, kwargs.get("dtype", args[0].dtype))
        return func(*args, **kwargs)


def write_out_autocast(
    graph: fx.Graph, device_type: str, dtype: torch.dtype | None, weights: set[fx.Node]
) -> None:
    """Insert the dtype conversions that autocast makes into a graph recorded under it.

    Args:
        graph: its nodes have fake values in `meta["val"]`.
        device_type: of the autocast.
        dtype: of the autocast; None is the device's default.
        weights: placeholders that stand for parameters: converted once, as autocast caches them.

    Raises:
        TraceError: an operator converts its arguments inside.
    """
    known: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
    for node in list(graph.nodes):
        if isinstance(node.target, torch._ops.OpOverload) and AUTOCAST_DONE not in node.meta:
            _convert(graph, node, _wanted(node, device_type, dtype), known, weights)


def _wanted(
    node: fx.Node, device_type: str, dtype: torch.dtype | None
) -> dict[fx.Node, torch.dtype]:
    """The arguments to convert so that an operator computes what it does under autocast."""
    sources = {id(n.meta["val"]): n for n in node.all_input_nodes}
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    if target._schema.is_mutable or not any(_is_float(n) for n in sources.values()):
        return {}
    # In the fake mode: intermediate results of an operator, such as a mask, are fake too.
    with _fake_mode(n.meta["val"] for n in node.all_input_nodes), torch.no_grad():
        with torch.autocast(device_type, dtype, cache_enabled=False), _Conversions(sources) as seen:
            made = _call(node, {})
        expected = _types(made)
        found: dict[fx.Node, torch.dtype] = seen.found
        if _types_with(node, found) == expected:
            return found
        floats = {n: _first_float(expected) for n in sources.values() if _is_float(n)}
        converted = {n: t for n, t in floats.items() if t is not None}
        if _types_with(node, converted) == expected:
            return converted
    raise TraceError(
        f"{node.meta.get('stack_trace') or node.name}: {node.target} under torch.autocast converts "
        "inside, which a trace cannot write out; convert its arguments in the model's code."
    )


def _fake_mode(values: Iterable[Any]) -> AbstractContextManager[Any]:
    """The mode of the fake tensors among some values."""
    modes = (value.fake_mode for value in values if isinstance(value, FakeTensor))
    return next(modes, nullcontext())


def _call(node: fx.Node, types: Mapping[fx.Node, torch.dtype]) -> Any:
    def value(source: fx.Node) -> Any:
        found = source.meta["val"]
        return found.to(types[source]) if source in types else found

    args, kwargs = fx.map_arg((node.args, node.kwargs), value)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _types_with(node: fx.Node, types: Mapping[fx.Node, torch.dtype]) -> list[Any] | None:
    """The dtypes that an operator returns for converted arguments; None if it refuses them."""
    speaks = logging.getLogger("torch._subclasses.fake_tensor")  # it logs every call that fails
    try:
        with mock.patch.object(speaks, "disabled", True):
            return _types(_call(node, types))
    except RuntimeError:
        return None


def _types(made: Any) -> list[Any]:
    many = made if isinstance(made, (tuple, list)) else [made]
    return [getattr(one, "dtype", None) for one in many]


def _first_float(types: list[Any]) -> torch.dtype | None:
    return next((t for t in types if t is not None and t.is_floating_point), None)


def _is_float(node: fx.Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _convert(
    graph: fx.Graph,
    node: fx.Node,
    types: Mapping[fx.Node, torch.dtype],
    known: dict[tuple[fx.Node, torch.dtype], fx.Node],
    weights: set[fx.Node],
) -> None:
    for source, dtype in types.items():
        if source.meta["val"].dtype == dtype:
            continue
        converted = known.get((source, dtype))
        if converted is None:
            with graph.inserting_before(node):
                converted = graph.call_function(aten.to.dtype, (source, dtype))
            kept = {k: v for k, v in node.meta.items() if k in ("stack_trace", "nn_module_stack")}
            converted.meta = {**kept, "val": source.meta["val"].to(dtype)}
        if source in weights:
            known[source, dtype] = converted
        node.replace_input_with(source, converted)
