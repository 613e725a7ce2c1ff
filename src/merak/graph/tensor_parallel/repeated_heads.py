"""Projections of fewer heads than ranks, rewritten so that each head comes once for every rank.

Attention with few heads of keys and values repeats each of them for several heads of queries. Where
the ranks are a multiple of these heads, they are repeated in the weights already, as often as there
are ranks for each, and the less behind: values stay the same, and every rank computes one head.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx

from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import Kind, ModelGraph, Segment
from merak.graph.ir.mutation import has_mutable_schema
from merak.graph.ir.operators import (
    ATTENTIONS,
    CONCATENATIONS,
    CONVERSIONS,
    COPIES,
    EXPANDS,
    NARROWS,
    NORMS,
    SAME_VALUES,
    SPLITS,
    TRANSPOSES,
    family,
)
from merak.graph.segment.cut import copy_graph
from merak.graph.tensor_parallel.placement import argument, positive, shape_of
from merak.ops.repeated_heads import repeat_heads

_RESHAPES_BY_SIZES = frozenset(("view", "reshape", "_unsafe_view"))
"""Reshapes whose second argument is the new sizes."""


class HeadRepeater:
    """Rewrites segments so that heads of some projections are repeated; each segment once.

    Args:
        degree: the number of ranks.
        names: weights and biases whose heads are repeated; others stay as they are.
    """

    def __init__(self, degree: int, names: Collection[str]) -> None:
        self.degree = degree
        self.names = frozenset(names)
        self._known: WeakKeyDictionary[fx.Graph, Segment] = WeakKeyDictionary()

    def __call__(self, segment: Segment) -> Segment:
        """A segment with repeated heads; the segment itself where nothing is repeated."""
        if self.names.isdisjoint(segment.parameters):
            return segment
        if segment.graph not in self._known:
            found = _Heads(segment.graph, self.degree, self.names)
            own = replace(segment, graph=found.repeated()) if found.values else segment
            self._known[segment.graph] = own
        return self._known[segment.graph]

    def model(self, model: ModelGraph) -> ModelGraph:
        """A model with such segments."""
        return replace(model, segments=tuple(map(self, model.segments))) if self.names else model


def few_heads(model: ModelGraph, degree: int) -> frozenset[str]:
    """Weights and biases of projections of fewer heads than ranks, which may be repeated.

    Args:
        model: the traced model.
        degree: the number of ranks.
    """
    found: set[str] = set()
    for segment in model.segments:
        found |= _Heads(segment.graph, degree, segment.parameters).names()
    return frozenset(found)


class _CannotRepeat(Exception):
    """An operator that reads the heads otherwise than one by one."""


@dataclass(frozen=True, slots=True)
class _Value:
    """A value with a dim of heads.

    Args:
        dim: which it is; one of all heads' outputs before they are taken apart.
        heads: how many there are; 0 before they are taken apart.
        sources: the projections that it comes from.
        is_expanded: whether the dim behind it repeats each head.
    """

    dim: int
    heads: int
    sources: frozenset[fx.Node]
    is_expanded: bool = False


class _Heads:
    """The values of a segment that have few heads, up to where each head is repeated.

    Args:
        graph: the segment's graph; left as it is.
        degree: the number of ranks.
        names: parameters that may be repeated.
    """

    def __init__(self, graph: fx.Graph, degree: int, names: Collection[str]) -> None:
        self.graph = graph
        self.degree = degree
        self.values: dict[fx.Node, _Value] = {}
        projections = {n for n in graph.nodes if _is_projection(n, names)}
        while projections:
            self.values = {}
            failed = self._follow(projections)
            if not failed:
                break
            projections -= failed
        if not projections:
            self.values = {}

    def names(self) -> set[str]:
        """The parameters of the projections."""
        sources = {source for value in self.values.values() for source in value.sources}
        return {_parameter(own).meta["name"] for n in sources for own in _weights(n)}

    def repeated(self) -> fx.Graph:
        """The graph in which heads are repeated."""
        new, _ = copy_graph(self.graph)
        copies = dict(zip(self.graph.nodes, new.nodes, strict=True))
        heads = {s: v.heads for v in self.values.values() if v.heads for s in v.sources}
        for node, value in self.values.items():
            number = value.heads or heads[next(iter(value.sources))]
            times = self.degree // number
            own = copies[node]
            own.meta = {**own.meta, "tensor": _grown(own.meta["tensor"], value, times)}
            if node in value.sources:
                for weight in map(copies.__getitem__, _weights(node)):
                    with new.inserting_before(own):
                        args = (weight, number, times)
                        more = new.call_function(repeat_heads, args)
                    more.meta = {**weight.meta, "origin": weight.name}
                    shown = _Value(0, number, value.sources)
                    more.meta["tensor"] = _grown(weight.meta["tensor"], shown, times)
                    own.replace_input_with(weight, more)
            elif _has_sizes(node):
                own.args = (own.args[0], _sizes(node, value, times), *own.args[2:])
        for node in self.graph.nodes:
            if family(node.target) == "repeat_interleave" and node not in self.values:
                for source in node.all_input_nodes:
                    if source in self.values:
                        times = self.degree // self.values[source].heads
                        operand, repeats, *rest = copies[node].args
                        copies[node].args = (operand, repeats // times, *rest)
        new.lint()
        return new

    def _follow(self, projections: Collection[fx.Node]) -> set[fx.Node]:
        """Find the values; returns the projections that cannot be repeated."""
        failed: set[fx.Node] = set()
        for node in self.graph.nodes:
            own = [self.values[n] for n in node.all_input_nodes if n in self.values]
            sources = frozenset[fx.Node]().union(*(value.sources for value in own))
            if node in projections:
                if own:
                    failed |= sources
                self.values[node] = _Value(len(shape_of(node)) - 1, 0, frozenset((node,)))
            elif own and node.op == "output":
                failed |= sources
            elif own:
                try:
                    found = self._behind(node, sources)
                except _CannotRepeat:
                    failed |= sources
                    continue
                if found is not None:
                    self.values[node] = found
        apart = {s for value in self.values.values() if value.heads for s in value.sources}
        return failed | ({*projections} - apart)

    def _behind(self, node: fx.Node, sources: frozenset[fx.Node]) -> _Value | None:
        """The heads of an operator's result; None where each head has been repeated."""
        name, shape = family(node.target), shape_of(node)
        inputs = {n: self.values[n] for n in node.all_input_nodes if n in self.values}
        first, value = next(iter(inputs.items()))
        if len({(one.heads, one.is_expanded) for one in inputs.values()}) > 1:
            raise _CannotRepeat
        found = replace(value, sources=sources)
        if name in ATTENTIONS:
            self._check_attention(node, inputs)
            return None
        if value.is_expanded and name not in _RESHAPES_BY_SIZES | {"flatten"}:
            raise _CannotRepeat
        if name in _RESHAPES_BY_SIZES | EXPANDS and not _has_sizes(node):
            raise _CannotRepeat
        if name in _RESHAPES_BY_SIZES | {"flatten"}:
            return self._reshaped(shape_of(first), shape, found)
        if not value.heads and name in TRANSPOSES | SPLITS | NARROWS | CONCATENATIONS:
            raise _CannotRepeat
        if name == "stack":
            if not all(n in inputs for n in node.all_input_nodes) or not value.heads:
                raise _CannotRepeat
            dim = positive(argument(node, "dim", 0), len(shape))
            return replace(found, dim=value.dim + (dim <= value.dim))
        if name in TRANSPOSES | {"unsqueeze"}:
            return replace(found, dim=_moved(node, len(shape_of(first)), value.dim))
        if name in EXPANDS:
            return self._expanded(shape_of(first), shape, found)
        if name == "repeat_interleave":
            times, dim = (*node.args[1:2], None)[0], argument(node, "dim")
            if (
                not value.heads
                or not isinstance(times, int)
                or times % (self.degree // value.heads)
            ):
                raise _CannotRepeat
            if (
                dim is None
                or positive(dim, len(shape)) != value.dim
                or "output_size" in node.kwargs
            ):
                raise _CannotRepeat
            return None
        if name == "getitem":
            return found
        if not _is_by_head(node, inputs):
            raise _CannotRepeat
        return found

    def _reshaped(self, old: tuple[int, ...], new: tuple[int, ...], value: _Value) -> _Value | None:
        dim = value.dim
        if old == new or (
            value.heads and not value.is_expanded and old[: dim + 1] == new[: dim + 1]
        ):
            return value
        if value.is_expanded:
            if new != (*old[:dim], old[dim] * old[dim + 1], *old[dim + 2 :]):
                raise _CannotRepeat
            return None
        heads = new[-2] if len(new) > 1 else 0
        is_taken_apart = not value.heads and new[:-2] == old[:-1] and heads * new[-1] == old[-1]
        if not is_taken_apart or not 1 < heads < self.degree or self.degree % heads:
            raise _CannotRepeat
        return replace(value, dim=len(new) - 2, heads=heads)

    def _expanded(self, old: tuple[int, ...], new: tuple[int, ...], value: _Value) -> _Value:
        behind = value.dim + 1
        if old == new:
            return value
        if not value.heads or len(old) != len(new) or old[behind : behind + 1] != (1,):
            raise _CannotRepeat
        if (*old[:behind], new[behind], *old[behind + 1 :]) != new:
            raise _CannotRepeat
        if new[behind] % (self.degree // value.heads):
            raise _CannotRepeat
        return replace(value, is_expanded=True)

    def _check_attention(self, node: fx.Node, inputs: Mapping[fx.Node, _Value]) -> None:
        """Check that several heads of queries have one of keys and values."""
        query, key, own, *_ = node.args
        assert isinstance(query, fx.Node) and isinstance(key, fx.Node) and isinstance(own, fx.Node)
        heads = shape_of(query)[-3:-2]
        is_grouped = bool(argument(node, "enable_gqa", False)) and inputs.keys() == {key, own}
        dims = {value.dim for value in inputs.values()}
        is_by_head = all(v.heads and not v.is_expanded for v in inputs.values())
        if not (is_grouped and is_by_head and dims == {len(shape_of(query)) - 3}):
            raise _CannotRepeat
        if heads[0] % self.degree:
            raise _CannotRepeat


def _is_projection(node: fx.Node, names: Collection[str]) -> bool:
    """Whether an operator is a linear layer whose parameters nothing else reads."""
    if node.op != "call_function" or family(node.target) != "linear":
        return False
    own = [_parameter(weight) for weight in _weights(node)]
    return all(
        n.op == "placeholder" and n.meta["kind"] is Kind.PARAMETER and n.meta["name"] in names
        for n in own
    ) and all(len(n.users) == 1 for n in own)


def _weights(node: fx.Node) -> list[fx.Node]:
    """The weight and the bias of a linear layer, as it reads them."""
    given = (argument(node, "weight"), argument(node, "bias"))
    return [weight for weight in given if isinstance(weight, fx.Node)]


def _parameter(node: fx.Node) -> fx.Node:
    """The parameter of a weight that may have been converted."""
    while node.op == "call_function" and family(node.target) in SAME_VALUES:
        if len(node.users) > 1 or len(node.all_input_nodes) != 1:
            break
        (node,) = node.all_input_nodes
    return node


def _moved(node: fx.Node, num_dims: int, dim: int) -> int:
    """Where an operator that moves dims puts one."""
    marked = torch.empty([1 + (d == dim) for d in range(num_dims)])
    target: Any = node.target
    return tuple(target(marked, *node.args[1:], **node.kwargs).shape).index(2)


def _is_by_head(node: fx.Node, inputs: Mapping[fx.Node, _Value]) -> bool:
    """Whether an operator gives every head from the same head of its operands."""
    name, target = family(node.target), node.target
    (first, value), *_ = inputs.items()
    shape = shape_of(first)
    if has_mutable_schema(node):
        return False
    if name in SPLITS | NARROWS | CONCATENATIONS:
        dim = argument(node, "dim", 0)
        is_other = isinstance(dim, int) and positive(dim, len(shape)) != value.dim
        operands = node.all_input_nodes
        return is_other and all(n in inputs and inputs[n].dim == value.dim for n in operands)
    if name in NORMS:
        normal: Any = argument(node, "normalized_shape", ())
        is_first = node.args[0] is first and len(inputs) == 1 and value.heads > 0
        return is_first and 0 < len(normal) < len(shape) - value.dim
    if name in ("mean", "sum"):
        given: Any = argument(node, "dim")
        dims = [given] if isinstance(given, int) else given or ()
        own = {positive(d, len(shape)) for d in dims}
        return bool(own) and argument(node, "keepdim", False) and value.dim not in own
    if torch.Tag.pointwise not in getattr(target, "tags", ()) and name not in CONVERSIONS | COPIES:
        return False
    result = len(shape_of(node))
    aligned = {one.dim + result - len(shape_of(n)) for n, one in inputs.items()}
    if len(aligned) != 1:
        return False
    (dim,) = aligned
    others = (n for n in node.all_input_nodes if n not in inputs)
    return dim == value.dim and all(
        _is_broadcast(n, dim - result + len(shape_of(n))) for n in others
    )


def _is_broadcast(node: fx.Node, dim: int) -> bool:
    """Whether a value is the same for all along a dim, which may be before its first."""
    return dim < 0 or shape_of(node)[dim] == 1


def _grown(meta: Any, value: _Value, times: int) -> Any:
    """The sizes of a value whose heads are repeated."""
    if isinstance(meta, tuple):
        return tuple(_grown(own, value, times) for own in meta)
    if not isinstance(meta, TensorMeta):
        return meta
    shape = list(meta.shape)
    shape[value.dim] *= times
    if value.is_expanded:
        shape[value.dim + 1] //= times
    return replace(meta, shape=tuple(shape))


def _has_sizes(node: fx.Node) -> bool:
    name = family(node.target)
    given = node.args[1] if len(node.args) > 1 else None
    return name in _RESHAPES_BY_SIZES | EXPANDS and isinstance(given, (list, tuple))


def _sizes(node: fx.Node, value: _Value, times: int) -> list[Any]:
    """The sizes that a reshape or an expansion is asked for, with repeated heads."""
    given: Any = node.args[1]
    sizes = list(given)
    if sizes[value.dim] != -1:
        sizes[value.dim] *= times
    if value.is_expanded and family(node.target) in EXPANDS and sizes[value.dim + 1] != -1:
        sizes[value.dim + 1] //= times
    return sizes
