"""Specialization of a symbolic trace to other batch sizes.

`torch.export` records guards, assumptions about sizes, beside the operators. Where they hold for
other sizes, the model runs the same operators at these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.types import py_sym_types

from merak.core.tensor_meta import TensorMeta
from merak.graph.trace.calls.exported import Exported
from merak.graph.trace.trace import normalized
from merak.graph.trace.traced import Trace

_WRAPPERS = ("wrap_with_set_grad_enabled", "wrap_with_autocast")


class NotResizable(Exception):
    """The trace does not hold for these sizes; the message says why."""


def at_sizes(exported: Exported, columns: Mapping[str, TensorMeta]) -> Trace:
    """Specialize a symbolic trace to a batch's sizes.

    Args:
        exported: the model traced with symbolic sizes; not changed.
        columns: the batch.

    Raises:
        NotResizable: its guards do not hold for these sizes, or depend on more than sizes.
    """
    if exported.replay is not None:
        raise NotResizable("its loss reads values on the host")
    environment = _environment(exported.graph)
    sizes = _bind(exported, columns)
    _check_guards(environment, sizes)
    graph = _Copier(sizes).copy(exported.graph, {})
    return normalized(replace(exported, graph=graph), columns)


def _environment(graph: fx.Graph) -> ShapeEnv:
    values = (node.meta.get("val") for node in graph.find_nodes(op="placeholder"))
    for value in values:
        mode = getattr(value, "fake_mode", None)
        if mode is not None and mode.shape_env is not None:
            found: ShapeEnv = mode.shape_env
            return found
    raise NotResizable("it was traced without symbols")


def _bind(exported: Exported, columns: Mapping[str, TensorMeta]) -> dict[Any, Any]:
    """Values of the size symbols, from the columns' sizes."""
    inputs = [spec.kind == InputKind.USER_INPUT for spec in exported.signature.input_specs]
    placeholders = exported.graph.find_nodes(op="placeholder")
    given = [p.meta["val"] for p, is_input in zip(placeholders, inputs, strict=True) if is_input]
    pairs: list[tuple[Any, int]] = []
    for name, value in zip(exported.columns, given, strict=True):
        meta = columns.get(name)
        if meta is None or meta.dtype != value.dtype or len(meta.shape) != value.ndim:
            raise NotResizable(f"the column {name} is another one")
        pairs += [(_expression(s), n) for s, n in zip(value.shape, meta.shape, strict=True)]
    if len(columns) != len(given):
        raise NotResizable("there are other columns")
    sizes: dict[Any, Any] = {}
    for expression, number in pairs:
        if expression.is_Symbol:
            sizes.setdefault(expression, sympy.Integer(number))
    for expression, number in pairs:
        if expression.xreplace(sizes) != number:
            raise NotResizable(f"a size is {number}, not {expression}")
    return sizes


def _expression(size: int | torch.SymInt) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def _check_guards(environment: ShapeEnv, sizes: Mapping[Any, Any]) -> None:
    if environment.deferred_runtime_asserts:
        raise NotResizable("the numbers in a tensor decide a size")
    for symbol, number in sizes.items():
        limits = environment.var_to_range.get(symbol)
        if limits is not None and not limits.lower <= number <= limits.upper:
            raise NotResizable(f"{symbol} is {number}, outside {limits}")
    for guard in environment.guards:
        if environment.replace(guard.expr).xreplace(sizes) is not sympy.true:
            raise NotResizable(f"{guard.expr} does not hold")


@dataclass(frozen=True, slots=True)
class _Known:
    """A tensor's layout: sizes, strides and offset, as numbers."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Body(nn.Module):
    """The graph that a wrapper wraps."""

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__()
        self.graph = graph


class _Copier:
    """Copies graphs, with numbers for size symbols."""

    def __init__(self, sizes: Mapping[Any, Any]) -> None:
        self._sizes = sizes
        self._numbers: dict[Any, int] = {}
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        # Views keep sharing a storage, by which later passes find writes.
        self._storages: dict[int, torch.UntypedStorage] = {}

    def copy(self, graph: fx.Graph, given: Mapping[fx.Node, Any]) -> fx.Graph:
        """Copy a graph without the operators that compute sizes.

        Args:
            graph: with symbols.
            given: values of its placeholders that stand for sizes.
        """
        made = fx.Graph()
        root = nn.Module()
        made.owning_module = root  # type: ignore[assignment]
        env: dict[fx.Node, Any] = dict(given)
        for node in graph.nodes:
            if node in given:
                continue
            if isinstance(node.target, torch._ops.HigherOrderOperator):
                self._copy_body(node, env, root)
                env[node] = made.create_node(
                    node.op, node.target, self._tensors(node.args, env), {}, node.name
                )
                env[node].meta = dict(node.meta)
                self._set_value(env[node])
            elif isinstance(node.meta.get("val"), py_sym_types):
                env[node] = _run(node, env)
            else:
                _check_assertion(node, env)
                env[node] = made.node_copy(node, lambda n: env[n])
                self._set_value(env[node])
                env[node] = _of_all(env[node])
        return made

    def _copy_body(self, call: fx.Node, env: Mapping[fx.Node, Any], root: nn.Module) -> None:
        """Copy the graph that a wrapper wraps; sizes are no longer its arguments."""
        target: Any = call.target
        position = next((i for i, a in enumerate(call.args) if isinstance(a, fx.Node)), None)
        if target.name() not in _WRAPPERS or position is None or call.kwargs:
            raise NotResizable(f"{target} runs in it")
        name = str(call.args[position].target)  # type: ignore[union-attr]
        body = getattr(call.graph.owning_module, name).graph
        placeholders = body.find_nodes(op="placeholder")
        arguments = [env.get(a, a) for a in call.args[position + 1 :]]  # type: ignore[arg-type]
        pairs = zip(placeholders, arguments, strict=True)
        graph = self.copy(body, {p: a for p, a in pairs if not isinstance(a, fx.Node)})
        setattr(root, name, _Body(graph))

    @staticmethod
    def _tensors(args: Iterable[Any], env: Mapping[fx.Node, Any]) -> tuple[Any, ...]:
        """A wrapper's arguments, without those that have become numbers."""
        found = [(a, env[a] if isinstance(a, fx.Node) else a) for a in args]
        return tuple(new for a, new in found if not isinstance(a, fx.Node) or type(new) is fx.Node)

    def _set_value(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, torch.Tensor) and _is_fixed(value):
            self._storages[value.untyped_storage()._cdata] = value.untyped_storage()
        elif value is not None:
            node.meta["val"] = self._value(value)

    def _value(self, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(self._value(v) for v in value)
        if isinstance(value, py_sym_types):
            return self._number(value)
        if not isinstance(value, torch.Tensor):
            return value
        if value.layout is not torch.strided:
            raise NotResizable(f"a tensor has the layout {value.layout}")
        old = value.untyped_storage()
        with self._mode:
            if old._cdata not in self._storages:
                num_bytes = self._number(old.nbytes())
                base = torch.empty(num_bytes, dtype=torch.uint8, device=value.device)
                self._storages[old._cdata] = base.untyped_storage()
            known = self._place(value)
            made = torch.empty(0, dtype=value.dtype, device=value.device)
            made.set_(self._storages[old._cdata], known.offset, known.size, known.stride)
        return made

    def _place(self, value: torch.Tensor) -> _Known:
        size = tuple(self._number(s) for s in value.shape)
        stride = tuple(self._number(s) for s in value.stride())
        return _Known(size, stride, self._number(value.storage_offset()))

    def _number(self, number: Any) -> int:
        if not isinstance(number, py_sym_types):
            return int(number)
        expression = number.node.expr
        if expression not in self._numbers:
            found = expression.xreplace(self._sizes)
            if not found.is_Integer:
                raise NotResizable(f"{expression} depends on more than the batch's sizes")
            self._numbers[expression] = int(found)
        return self._numbers[expression]


def _is_fixed(value: torch.Tensor) -> bool:
    return not any(isinstance(n, torch.SymInt) for n in (*value.shape, *value.stride()))


def _run(node: fx.Node, env: Mapping[fx.Node, Any]) -> Any:
    """Compute a symbolic scalar's value as the model's code would."""

    def known(argument: fx.Node) -> Any:
        found = env[argument]
        return found.meta["val"] if isinstance(found, fx.Node) else found

    function: Any = node.target
    if node.op != "call_function":
        raise NotResizable(f"{node} is a number that nothing computes")
    try:
        made = function(*fx.map_arg(node.args, known), **fx.map_arg(node.kwargs, known))
    except Exception as error:
        raise NotResizable(f"{node} cannot be computed: {error}") from error
    if not isinstance(made, (int, float, bool)):
        raise NotResizable(f"{node} is no number")
    return made


def _of_all(node: fx.Node) -> fx.Node:
    """The argument of a slice of all elements, which indexing omits where sizes are numbers."""
    if node.target is not torch.ops.aten.slice.Tensor or node.kwargs:
        return node
    given: tuple[Any, ...] = node.args
    source, dim, start, end, step = given + (0, 0, None, 1)[len(given) - 1 :]
    assert isinstance(source, fx.Node)
    size = source.meta["val"].shape[dim]
    everything = start in (0, None) and step == 1 and (end is None or end >= size)
    if not everything:
        return node
    node.graph.erase_node(node)
    return source


def _check_assertion(node: fx.Node, env: Mapping[fx.Node, Any]) -> None:
    if node.target is torch.ops.aten._assert_scalar.default:
        what = node.args[0]
        if not (env[what] if isinstance(what, fx.Node) else what):
            raise NotResizable(f"{node} does not hold")
