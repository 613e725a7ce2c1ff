"""Attention masks whose values are known: they hide later tokens alone, or nothing.

Kernels that take a mask are slower than those that know `is_causal`, and a model that makes its
mask itself hands it over whatever it hides. What such a mask is made of is in the graph: sizes,
constants, buffers that are triangles, and columns of the batch that may be ones.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from merak.core.tensor_meta import TensorMeta, requires_grad
from merak.graph.ir.ir import Kind
from merak.graph.ir.mutation import Mutations, find_mutations
from merak.graph.ir.operators import (
    EMBEDDINGS,
    FILLS_LIKE,
    FILLS_NEW,
    SHAPED_LIKE,
    aten_family,
    family,
)
from merak.graph.ir.reachable import reachable
from merak.graph.ir.state_read import MODEL, StateRead
from merak.graph.trace.normalize import Rewriting, is_random
from merak.graph.trace.state.kept import triangle_of
from merak.graph.trace.verify import is_fake_or_meta

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_AS_ANOTHER = SHAPED_LIKE | {"expand_as", "type_as", "to"}
"""Operators that give an operand the shape or type of another."""
_MOST_ELEMENTS = 2**27
_HIDDEN = -1e9
"""A summand of scores that leaves a weight of zero, whatever the scores are."""


def drop_plain_masks(rewriting: Rewriting) -> None:
    """Give attention `is_causal`, or nothing, in place of a mask that says no more than that.

    Where it does so for columns of ones alone, these are noted as queried.

    Args:
        rewriting: its graph is changed in place.
    """
    graph = rewriting.graph
    writes = find_mutations(graph)
    known: dict[tuple[fx.Node, ...], bool | None] = {}
    for node in graph.find_nodes(op="call_function", target=_ATTENTION):
        given = dict(zip(_ARGUMENTS, node.args, strict=False)) | node.kwargs
        if not isinstance(given.get("attn_mask"), fx.Node) or given.get("is_causal"):
            continue
        origin = _Origin.of(node, given["attn_mask"], writes)
        if origin.nodes not in known:
            known[origin.nodes] = _meaning(origin, rewriting)
        is_causal = known[origin.nodes]
        names = origin.names(Kind.COLUMN)
        if is_causal is None:
            continue
        rewriting.queried.update(names)
        if not all(rewriting.columns[name].ones for name in names):
            continue
        rewriting.reads += [
            StateRead(MODEL, path, (attribute,), str(node.meta.get("source") or ""))
            for path, _, attribute in (n.rpartition(".") for n in origin.names(Kind.BUFFER))
            if f"{path}.{attribute}".lstrip(".") in rewriting.buffers
        ]
        given |= {"attn_mask": None, "dropout_p": given.get("dropout_p", 0.0)}
        given["is_causal"] = is_causal
        node.args = tuple(given.pop(name) for name in _ARGUMENTS)
        node.kwargs = given


def lay_out_learned_masks(rewriting: Rewriting) -> None:
    """Lay masks that get a gradient out row by row, as GPUs' fused attention reads them.

    T5's comes as a permutation, from which torch makes products of matrices there.

    Args:
        rewriting: its graph is changed in place.
    """
    laid_out: dict[fx.Node, fx.Node] = {}
    for node in rewriting.graph.find_nodes(op="call_function", target=_ATTENTION):
        given = dict(zip(_ARGUMENTS, node.args, strict=False)) | node.kwargs
        mask = given.get("attn_mask")
        if (
            isinstance(mask, fx.Node)
            and mask.op != "placeholder"
            and requires_grad(mask.meta["tensor"])
        ):
            if mask not in laid_out:
                with rewriting.graph.inserting_after(mask):
                    made = rewriting.graph.call_function(torch.ops.aten.contiguous.default, (mask,))
                made.meta, laid_out[mask] = dict(mask.meta), made
            node.replace_input_with(mask, laid_out[mask])


@dataclass(frozen=True, slots=True)
class _Origin:
    """The operators that make a mask, writes in place among them.

    Args:
        nodes: in the order in which they run; the mask is what they end with, or a part of it.
        mask: the mask.
        are_written: whether some write into a placeholder.
    """

    nodes: tuple[fx.Node, ...]
    mask: fx.Node
    are_written: bool

    @staticmethod
    def of(attention: fx.Node, mask: fx.Node, writes: Mutations) -> _Origin:
        """What makes the mask of an attention."""
        found = reachable([mask], lambda node: (*_read_values(node), *writes.group(node)))
        nodes = tuple(sorted(node for node in found if node < attention))
        written = {number for number, own in writes.writers.items() if not found.isdisjoint(own)}
        are_written = any(n.op == "placeholder" and n.meta["storage"] in written for n in nodes)
        return _Origin(nodes, mask, are_written)

    def names(self, kind: Kind) -> list[str]:
        """Names of the placeholders of a kind."""
        inputs = (node for node in self.nodes if node.op == "placeholder")
        return [node.meta["name"] for node in inputs if node.meta["kind"] is kind]

    def mask_for(self, ones: int, rewriting: Rewriting) -> torch.Tensor:
        """The mask of a batch whose columns have one value everywhere."""
        graph, inputs = fx.Graph(), []
        copies: dict[fx.Node, fx.Node] = {}
        for node in self.nodes:
            for like in set(node.all_input_nodes) - copies.keys():  # whose values are not read
                copies[like] = graph.placeholder(like.name)
                meta = like.meta["tensor"]
                inputs.append(torch.empty((), dtype=meta.dtype).expand(meta.shape))
            copies[node] = made = graph.node_copy(node, copies.__getitem__)
            made.args, made.kwargs = fx.node.map_aggregate((made.args, made.kwargs), _on_host)
            if node.op == "placeholder":
                inputs.append(_value(node, ones, rewriting))
        graph.output(copies[self.mask])
        with torch.no_grad():
            found = fx.Interpreter(fx.GraphModule({}, graph)).run(*inputs)
        assert isinstance(found, torch.Tensor)
        return found


def _meaning(origin: _Origin, rewriting: Rewriting) -> bool | None:
    """Whether a mask hides later tokens (true), or nothing; None for any other, or an unknown one.

    Columns are taken for ones; where the mask does not depend on that, it says nothing of them.
    """
    inputs = [node for node in origin.nodes if node.op == "placeholder"]
    made = [node for node in origin.nodes if node.op != "placeholder"]
    if origin.are_written or not all(_is_known(node, rewriting) for node in inputs):
        return None
    if not all(map(_can_run, made)):
        return None
    try:
        found = _hides_later(origin.mask_for(1, rewriting))
        names = origin.names(Kind.COLUMN)
        if found is None or (names and _hides_later(origin.mask_for(0, rewriting)) == found):
            return None
    except Exception:  # of an operator that host and values do not suit: the mask stays
        return None
    return found


def _read_values(node: fx.Node) -> list[fx.Node]:
    """Operands of which more is read than their shape and type."""
    name = aten_family(node.target) if node.op == "call_function" else ""
    places = {0} if name in FILLS_LIKE | FILLS_NEW else {1} if name in _AS_ANOTHER else set()
    unread = [node.args[place] for place in places if place < len(node.args)]
    return [operand for operand in node.all_input_nodes if operand not in unread]


def _is_known(node: fx.Node, rewriting: Rewriting) -> bool:
    """Whether an input has known values, or may be a mask of tokens."""
    name = node.meta["name"]
    if node.meta["kind"] is Kind.COLUMN:
        is_looked_up = any(family(user.target) in EMBEDDINGS for user in node.users)
        return rewriting.columns[name].may_be_ones and not is_looked_up
    if name in rewriting.constants:
        return not is_fake_or_meta(rewriting.constants[name])
    return name in rewriting.buffers and triangle_of(rewriting.buffers[name]) is not None


def _can_run(node: fx.Node) -> bool:
    metas = node.meta.get("tensor")
    sizes = [math.prod(m.shape) for m in (metas if isinstance(metas, Sequence) else [metas]) if m]
    is_small = max(sizes, default=0) <= _MOST_ELEMENTS
    is_known = node.target is operator.getitem or bool(aten_family(node.target))
    return is_small and is_known and not is_random(node)


def _value(node: fx.Node, ones: int, rewriting: Rewriting) -> torch.Tensor:
    name = node.meta["name"]
    if node.meta["kind"] is Kind.COLUMN:
        meta: TensorMeta = rewriting.columns[name]
        return torch.full(meta.shape, ones, dtype=meta.dtype)
    values = rewriting.constants if name in rewriting.constants else rewriting.buffers
    return values[name].detach().cpu()


def _on_host(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _hides_later(mask: torch.Tensor) -> bool | None:
    """Whether a mask hides later tokens alone (true), or nothing; None for any other."""
    if mask.dtype is torch.bool:
        hidden = ~mask
    else:
        hidden = mask <= max(_HIDDEN, torch.finfo(mask.dtype).min)
        if not bool((hidden | (mask == 0)).all()):
            return None
    if not bool(hidden.any()):
        return False
    queries, keys = hidden.shape[-2:]
    later = torch.ones(queries, keys, dtype=torch.bool).triu(1)
    is_later = queries == keys and torch.equal(hidden, later.expand_as(hidden))
    return True if is_later else None
