"""Numbers of each row's logits, made a chunk of rows at a time: a last rewriting of a segment.

Losses written by hand read of a head's logits a few numbers of each token, such as the
log-probability of a label and the entropy. The linear layer and all operators up to these numbers
become one operator, `ops.chunked_rows`, if each computes every row by itself: the rules that share
work among ranks say so, to which a chunk is a shard.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
from torch import fx

from merak.core.errors import ShardError
from merak.core.tensor_meta import TensorMeta
from merak.graph.context_parallel.rules import RULES
from merak.graph.ir.ir import returned_nodes
from merak.graph.ir.mutation import is_mutating
from merak.graph.ir.operators import draws, family
from merak.graph.segment.cut import copy_graph
from merak.graph.tensor_parallel.placement import (
    REPLICATE,
    Operator,
    ResultPlacement,
    Shard,
    is_opaque,
    shape_of,
)
from merak.graph.tensor_parallel.rules.elementwise import is_elementwise
from merak.graph.tensor_parallel.rules.rules import decide
from merak.ops.chunked_rows import VALUE, Call, RowFunction, chunked_rows, name_of
from merak.ops.linear import Sent, sent_by, sent_inside

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class RowHead:
    """A linear layer of whose results each row is read by itself, and what is computed of them.

    Args:
        node: of the layer.
        dim: of its results that chunks are cut along.
        calls: what is computed of one chunk, in the graph's order.
        placed: where their results and all that they read are cut; a shard is one index.
        results: those of `calls` that others read, none as large as the logits.
    """

    node: fx.Node
    dim: int
    calls: tuple[fx.Node, ...]
    placed: Mapping[fx.Node, ResultPlacement]
    results: tuple[fx.Node, ...]

    @property
    def bytes_of_index(self) -> int:
        """Bytes of everything as large as logits that a chunk of one index makes, at the most.

        What calls make may be kept until their backward; that makes a gradient of a result, sums it
        with another one, and reads what it makes of it.
        """
        each = sum(n.meta["tensor"].num_bytes for n in (self.node, *self._large))
        gradients = 3 * 4 * math.prod(shape_of(self.node))
        return int(each + gradients) // shape_of(self.node)[self.dim]

    @property
    def _large(self) -> list[fx.Node]:
        """Calls whose results are as large as logits."""
        return [n for n in self.calls if _is_large(n, self.node)]

    @property
    def num_passes(self) -> int:
        """How often calls read or write something as large as logits."""
        made = {self.node, *self._large}
        return len(self._large) + sum(n in made for c in self.calls for n in c.all_input_nodes)


def _large_layers(graph: fx.Graph, chunk_bytes: int) -> list[fx.Node]:
    """Linear layers with more logits than those of a chunk."""
    layers = [node for node in graph.nodes if node.target is aten.linear.default]
    return [n for n in layers if len(shape_of(n)) > 1 and 4 * math.prod(shape_of(n)) > chunk_bytes]


def is_less_in_chunks(weight: fx.Node, whole: int, gradients: int, chunk_bytes: int) -> bool:
    """Whether a head's logits in chunks take less memory than all of them.

    A chunk takes twice its logits. The gradient of a trained weight, which is made of all rows at
    once where no row is in a chunk, is summed over chunks in float32, so that chunks take more
    where tokens are few and the hidden size is large.

    Args:
        weight: of the head.
        whole: bytes of all that is made of all logits, gradients included.
        gradients: bytes of the gradients of all logits, of which that of the weight is made.
        chunk_bytes: of a chunk's float32 logits.
    """
    of_weight: TensorMeta = weight.meta["tensor"]
    if not of_weight.requires_grad:
        return whole > 2 * chunk_bytes
    summed = max(of_weight.num_bytes, 4 * math.prod(of_weight.shape))
    return max(whole, gradients + of_weight.num_bytes) > 2 * chunk_bytes + summed


def rows_in_chunks(graph: fx.Graph, chunk_bytes: int) -> fx.Graph | None:
    """Graph of a segment with such heads in chunks.

    Args:
        graph: as a rank runs it; left as it is.
        chunk_bytes: of float32 logits; a head that makes no more is left as it is, and what a chunk
            makes takes twice as much.

    Returns:
        A copy; None where there is no such head.
    """
    if not _large_layers(graph, chunk_bytes):
        return None
    new, _ = copy_graph(graph)
    for node in _large_layers(new, chunk_bytes):
        _take_rows_first(node)
    is_changed = False
    while found := _first_head(new, chunk_bytes):
        _replace(new, *found)
        is_changed = True
    new.lint()
    return new if is_changed else None


def _first_head(graph: fx.Graph, chunk_bytes: int) -> tuple[RowHead, int] | None:
    """The first head whose logits can be made in chunks, and the indices of one."""
    for node in _large_layers(graph, chunk_bytes):
        head = _head_of(node)
        if head is None:
            continue
        weight: Any = node.args[1]
        each, size = head.bytes_of_index, shape_of(node)[head.dim]
        if is_less_in_chunks(weight, each * size, node.meta["tensor"].num_bytes, chunk_bytes):
            return head, max(2 * chunk_bytes // each, 1)
    return None


def _take_rows_first(node: fx.Node) -> None:
    """Let a linear layer read the rows alone that are taken of its results."""
    shapes, calls = [], []
    last = node
    while len(last.users) == 1:
        (user,) = last.users
        if changes_rows(user):
            shapes.append(user)
        elif len(user.all_input_nodes) == 1 and is_elementwise(user.target):
            calls.append(user)
        else:
            break
        last = user
    if not shapes:
        return
    hidden: Any = node.args[0]
    with node.graph.inserting_before(node):
        for shape in shapes:
            hidden = of_rows(shape, hidden)
    node.update_arg(0, hidden)
    rows = shape_of(shapes[-1])[:-1]
    for call in (node, *calls):
        own = call.meta["tensor"]
        call.meta = {**call.meta, "tensor": replace(own, shape=(*rows, shape_of(call)[-1]))}
    for shape in shapes:
        source: Any = shape.args[0]
        shape.replace_all_uses_with(source)
        node.graph.erase_node(shape)


def changes_rows(node: fx.Node) -> bool:
    """Whether an operator gives the same logits to other rows, each with all of its classes."""
    name, before, after = family(node.target), shape_of(node.args[0]), shape_of(node)
    if name in ("view", "reshape", "_unsafe_view", "contiguous", "clone"):
        return bool(before and after) and before[-1] == after[-1]
    if name not in ("slice", "select", "narrow"):
        return False
    dim = node.args[1] if len(node.args) > 1 else 0
    return isinstance(dim, int) and dim % len(before) != len(before) - 1


def of_rows(shape: fx.Node, hidden: fx.Node) -> fx.Node:
    """What a head reads, for the rows that an operator takes of its results.

    Args:
        shape: the operator, as of `changes_rows`.
        hidden: for the rows before it.
    """
    size = shape_of(hidden)[-1]
    name, wanted = family(shape.target), (*shape_of(shape)[:-1], size)
    if name in ("slice", "select", "narrow"):
        return with_shape(shape.target, (hidden, *shape.args[1:]), hidden, wanted)
    if wanted != shape_of(hidden):
        return with_shape(aten.reshape.default, (hidden, list(wanted)), hidden, wanted)
    return hidden


def with_shape(
    target: Any, args: tuple[Any, ...], like: fx.Node, shape: tuple[int, ...]
) -> fx.Node:
    """A call whose result differs from another one's in its shape."""
    new = like.graph.call_function(target, args)
    new.meta = {**like.meta, "tensor": replace(like.meta["tensor"], shape=shape)}
    return new


_LARGE = 16
"""Logits for each number of a result that is not large: heads have thousands, other layers few."""


def _is_large(node: fx.Node, logits: fx.Node) -> bool:
    """Whether a result has a number for every few logits."""
    return _LARGE * math.prod(shape_of(node)) >= math.prod(shape_of(logits))


def _head_of(node: fx.Node) -> RowHead | None:
    """What is computed of the rows of a linear layer; None where a row is not read by itself."""
    leading = shape_of(node)[:-1]
    dim, size = leading.index(max(leading)), max(leading)
    placed: dict[fx.Node, ResultPlacement] = {node: Shard(dim, (size,))}
    returned = set(returned_nodes(node.graph))
    inside = _inside(node)
    for call in inside:
        cut = _cut(call, placed, size)
        if cut is None:
            return None
        placed |= cut
    calls = tuple(inside)
    members = {node, *calls}
    read_outside = [n for n in members if n in returned or any(u not in members for u in n.users)]
    results = tuple(n for n in calls if n in read_outside)
    if node in read_outside or not results or any(_is_large(n, node) for n in results):
        return None
    if any(draws(n.target) or is_mutating(n) for n in _between(results, calls)):
        return None
    return RowHead(node, dim, calls, placed, results)


def _inside(node: fx.Node) -> list[fx.Node]:
    """Operators on a way from logits to a large result, and the first ones behind these."""
    behind = {node}
    order = []
    for other in node.graph.nodes:
        if other.op == "call_function" and not behind.isdisjoint(other.all_input_nodes):
            behind.add(other)
            order.append(other)
    large = {n for n in behind if _is_large(n, node)}
    wanted = {n for n in order if not large.isdisjoint(n.all_input_nodes)}
    for other in reversed(order):
        if other in wanted:
            wanted.update(n for n in other.all_input_nodes if n in behind and n is not node)
    return [n for n in order if n in wanted]


def _between(results: Sequence[fx.Node], calls: Sequence[fx.Node]) -> list[fx.Node]:
    """Operators that read the first results before the last of the calls."""
    behind, found = set(results), []
    node = calls[0]
    while node is not calls[-1]:
        if node not in calls and not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
            found.append(node)
        node = node.next
    return found


def _cut(
    call: fx.Node, placed: Mapping[fx.Node, ResultPlacement], size: int
) -> dict[fx.Node, ResultPlacement] | None:
    """Where a call's result and all that it reads are cut; None where it does not work on chunks.

    Args:
        call: an operator.
        placed: where values are cut.
        size: of the dim that is cut, in the logits.
    """
    target = call.target
    if is_opaque(target) or draws(target) or is_mutating(call):
        return None
    if isinstance(call.meta["tensor"], tuple):
        return None
    known = {n: placed.get(n, REPLICATE) for n in call.all_input_nodes}
    op = Operator(call, known, size)
    rule = RULES.get(family(target))
    try:
        decision = (rule(op) if rule is not None else None) or decide(op)
    except ShardError:
        return None
    if (decision.target, decision.args, decision.kwargs, decision.then) != (None, None, None, ()):
        return None
    if not isinstance(decision.output, Shard) or decision.output.parts != (size,):
        return None
    needs = {n: decision.needs.get(n, known[n]) for n in known}
    if any(n in placed and needs[n] != placed[n] for n in needs):
        return None
    if any(n not in placed and n.meta["tensor"].requires_grad for n in needs):
        return None
    return {**needs, call: decision.output}


def _replace(graph: fx.Graph, head: RowHead, rows: int) -> None:
    """Put one operator in the place of a head and what is computed of its logits."""
    hidden, weight, bias, *_ = (*head.node.args, None)
    further = list(
        dict.fromkeys(
            n
            for call in head.calls
            for n in call.all_input_nodes
            if n is not head.node and n not in head.calls
        )
    )
    numbers = {n: place for place, n in enumerate((head.node, *further, *head.calls))}
    function = RowFunction(
        head.dim,
        rows,
        tuple(_dim(head.placed[n]) for n in further),
        tuple(_call(call, numbers, head) for call in head.calls),
        tuple((numbers[n], _dim(head.placed[n])) for n in head.results),
        tuple(n.meta["tensor"].requires_grad for n in head.results),
        head.num_passes,
        _sent(head, rows),
    )
    waiting = _between(head.results, head.calls)
    with graph.inserting_after(head.calls[-1]):
        args = (*function, hidden, weight, bias, *further)
        made = graph.call_function(chunked_rows, args)
    made.meta = {**head.node.meta, "tensor": tuple(n.meta["tensor"] for n in head.results)}
    place = made
    for number, result in enumerate(head.results):
        with graph.inserting_after(place):
            place = graph.call_function(operator.getitem, (made, number))
        place.meta = dict(result.meta)
        result.replace_all_uses_with(place)
    for node in waiting:
        place.append(node)
        place = node
    for node in (*reversed(head.calls), head.node):
        graph.erase_node(node)


def _dim(placed: ResultPlacement) -> int:
    return placed.dim if isinstance(placed, Shard) else -1


def _call(call: fx.Node, numbers: Mapping[fx.Node, int], head: RowHead) -> Call:
    """A call as data."""
    own = set(head.calls) | {head.node}
    later = list(head.calls)[list(head.calls).index(call) + 1 :]
    kept = {n for other in later for n in other.all_input_nodes} | set(head.results)
    ends = tuple(numbers[n] for n in call.all_input_nodes if n in own and n not in kept)

    def plain(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return (VALUE, numbers[argument])
        if isinstance(argument, list | tuple):
            return tuple(plain(one) for one in argument)
        return argument

    kwargs = tuple((key, plain(one)) for key, one in call.kwargs.items())
    return name_of(call.target), plain(tuple(call.args)), kwargs, ends


def _sent(head: RowHead, rows: int) -> Sent:
    """Collectives of all chunks: those of all rows, in as many parts."""
    chunks = math.ceil(shape_of(head.node)[head.dim] / rows)
    sent: list[tuple[str, int, str]] = []
    for call in head.calls:
        facts = sent_by(call.target)
        own = sent_inside(call.target, call.args)
        if facts.there is not None:
            function: Any = call.target
            given = signature(function).bind(*call.args, **call.kwargs).arguments
            own = (*own, (facts.there, call.meta["tensor"].num_bytes, given["axis"]))
        sent += [(kind, size // chunks, axis) for kind, size, axis in own] * chunks
    return tuple(sent)
