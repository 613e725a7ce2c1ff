"""Index ranges: columns of a batch that are rows of a table or classes of a loss.

A token id beyond the vocabulary fails deep inside a look-up, on a GPU with an assertion of the
device that names nothing. The graph knows which columns are looked up where, so that the numbers
can be held against the tables before anything runs, while they are still in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import Kind, ModelGraph, Segment
from merak.graph.ir.mutation import find_mutations
from merak.graph.ir.operators import (
    CLASS_LOSSES,
    COMPARISONS,
    CONCATENATIONS,
    EMBEDDINGS,
    FILLS_LIKE,
    LOGICAL,
    NARROWS,
    PADS,
    RESHAPES,
    SAME_VALUES,
    SPLITS,
    SQUEEZES,
    TRANSPOSES,
    UNINITIALIZED,
    aten_family,
)
from merak.graph.program.codegen import runnable

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

_REARRANGED = RESHAPES | SQUEEZES | TRANSPOSES | SAME_VALUES | {"expand", "lift_fresh_copy"}
"""Operators whose result has the numbers of their operand, and all of them."""

_SELECTED = (
    NARROWS
    | PADS
    | CONCATENATIONS
    | COMPARISONS
    | LOGICAL
    | SPLITS
    | frozenset("select masked_fill where roll flip add sub rsub mul clamp".split())
    | (FILLS_LIKE - UNINITIALIZED)
)
"""Operators that leave numbers out, put others in, or shift them; they are run to see which."""


@dataclass(frozen=True, slots=True)
class IndexRange:
    """Range check of the indices that a microbatch holds.

    Args:
        columns: the columns they are computed from.
        indices: computes them, from the columns in that order; None where they are a column's.
        size: indices are 0 … size − 1.
        ignored: an index that stands for nothing, and may be any number; None for none.
        table: what they are looked up in, for people to read.
    """

    columns: tuple[str, ...]
    indices: Callable[..., tuple[torch.Tensor, ...]] | None
    size: int
    ignored: int | None
    table: str


def find_index_ranges(model: ModelGraph) -> tuple[IndexRange, ...]:
    """Index ranges of a traced model, as far as they follow from columns alone.

    Args:
        model: not yet rewritten for a rank's shard of it.
    """
    graphs = (model.prologue.graph, *(segment.graph for segment in model.segments))
    written = {memory for graph in graphs for memory in find_mutations(graph).writers}
    known = _Known(_outputs(model.prologue), written)
    found: dict[object, IndexRange] = {}
    for segment in model.segments:
        for node in segment.graph.nodes:
            place = _look_up(node)
            if place is None:
                continue
            indices, size, ignored, table = place
            one = _range_of(indices, known, size, ignored, table)
            if one is not None:
                # Where the indices are a column's own, layers that look up alike are one.
                key = id(one) if one.indices else (one.columns, size, ignored, table)
                found.setdefault(key, one)
    return tuple(found.values())


def out_of_range(ranges: Sequence[IndexRange], batch: Mapping[str, torch.Tensor]) -> str | None:
    """Message about the first index of a batch that is out of its range; None for none.

    Columns that are not there, or not in host memory, where looking would wait for the device, are
    not looked at.
    """
    for one in ranges:
        columns = [batch[name] for name in one.columns if name in batch]
        if len(columns) < len(one.columns) or any(c.device.type != "cpu" for c in columns):
            continue
        indices = columns[0] if one.indices is None else one.indices(*columns)[0]
        least, most = _ends(indices, one)
        if least < 0 or most >= one.size:
            return _sentence(one, least if least < 0 else most)
    return None


def _ends(indices: torch.Tensor, one: IndexRange) -> tuple[int, int]:
    """Smallest and largest index that counts."""
    if not indices.numel():
        return 0, 0
    least, most = (int(end) for end in torch.aminmax(indices))
    if one.ignored is not None and (least < 0 or most >= one.size):
        indices = indices.masked_fill(indices == one.ignored, 0)
        least, most = (int(end) for end in torch.aminmax(indices))
    return least, most


def _sentence(one: IndexRange, index: int) -> str:
    names = " and ".join(repr(name) for name in dict.fromkeys(one.columns))
    holds = "holds" if one.indices is None else "gives"
    ignored = "" if one.ignored is None else f" (and {one.ignored}, which does not count)"
    larger = ", or a model with room for it" if index >= one.size else ""
    return (
        f"column {names} {holds} the index {index}, but {one.table} takes 0 to {one.size - 1}"
        f"{ignored}; use the tokenizer or labels that the model is made for{larger}."
    )


@dataclass(frozen=True, slots=True)
class _Known:
    """Nodes that indices may be computed from.

    Args:
        made: what makes each batch-only value in the prologue.
        written: memory that is written in place: its numbers come from more than its node.
    """

    made: Mapping[str, fx.Node]
    written: Container[object]

    def behind(self, node: fx.Node) -> fx.Node:
        """Node of the prologue that makes a batch-only value; any other node itself."""
        if node.op == "placeholder" and node.meta["kind"] is Kind.BATCH_ONLY:
            return self.made.get(node.meta["name"], node)
        return node

    def is_plain(self, node: fx.Node) -> bool:
        """Whether a node is a column, or an operator that may be run beside the model."""
        if node.meta.get("storage") in self.written:
            return False
        if node.op == "placeholder":
            return node.meta["kind"] is Kind.COLUMN
        return node.op == "call_function" and aten_family(node.target) in _REARRANGED | _SELECTED


Place = tuple[fx.Node, int, int | None, str]
"""The indices of a look-up, the size of what is looked into, the ignored index, and its name."""


def _look_up(node: fx.Node) -> Place | None:
    if node.op != "call_function":
        return None
    name = aten_family(node.target)
    if name in EMBEDDINGS:
        weight, indices = node.args[0], node.args[1]
        if not isinstance(weight, fx.Node) or not isinstance(indices, fx.Node):
            return None
        size = weight.meta["tensor"].shape[0]
        named = weight.meta.get("name", "a table")
        return indices, size, None, f"{named} of {size} rows"
    if name in CLASS_LOSSES:
        scores, target = node.args[0], node.args[1]
        if not isinstance(scores, fx.Node) or not isinstance(target, fx.Node):
            return None
        shape = scores.meta["tensor"].shape
        size = shape[1] if len(shape) > 1 else shape[0]
        return target, size, _ignored(node), f"the loss over {size} classes"
    return None


def _ignored(node: fx.Node) -> int:
    given = node.args[4] if len(node.args) > 4 else node.kwargs.get("ignore_index", -100)
    return given if isinstance(given, int) else -100


def _outputs(prologue: Segment) -> dict[str, fx.Node]:
    """Node of the prologue that makes each batch-only value."""
    (returned,) = prologue.graph.output_node().args
    assert isinstance(returned, tuple | list)
    pairs = zip(prologue.outputs, returned, strict=True)
    return {name: node for name, node in pairs if isinstance(node, fx.Node)}


def _range_of(
    indices: fx.Node, known: _Known, size: int, ignored: int | None, table: str
) -> IndexRange | None:
    meta = indices.meta["tensor"]
    if not isinstance(meta, TensorMeta) or meta.dtype not in _INTEGERS:
        return None  # probabilities of classes
    nodes = _made_of(indices, known)
    columns = [n for n in nodes or () if n.op == "placeholder"]
    if nodes is None or not columns:
        return None  # of a parameter, of random numbers, or counted by the model itself
    names = tuple(n.meta["name"] for n in columns)
    operators = [n for n in nodes if n.op != "placeholder"]
    if len(names) == 1 and all(aten_family(n.target) in _REARRANGED for n in operators):
        return IndexRange(names, None, size, ignored, table)
    function = runnable(_copied(columns, operators, indices, known))
    return IndexRange(names, function, size, ignored, table)


def _made_of(indices: fx.Node, known: _Known) -> list[fx.Node] | None:
    """Nodes that indices are computed from, in order; None if one cannot run beside the model."""
    order: dict[fx.Node, None] = {}
    stack: list[tuple[fx.Node, bool]] = [(indices, False)]
    while stack:
        node, is_done = stack.pop()
        node = known.behind(node)
        if node in order:
            continue
        if not known.is_plain(node):
            return None
        if is_done or node.op == "placeholder":
            order[node] = None
            continue
        stack.append((node, True))
        stack += [(source, False) for source in node.all_input_nodes]
    return list(order)


def _copied(
    columns: Sequence[fx.Node], operators: Sequence[fx.Node], indices: fx.Node, known: _Known
) -> fx.Graph:
    """Graph of the operators on its own, which runs in host memory."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in (*columns, *operators):
        copy = graph.node_copy(node, lambda source: copies[known.behind(source)])
        copy.args = map_aggregate(copy.args, _in_host_memory)
        copy.kwargs = map_aggregate(copy.kwargs, _in_host_memory)
        copies[node] = copy
    graph.output((copies[known.behind(indices)],))
    return graph


def _in_host_memory(argument: Any) -> Any:
    return torch.device("cpu") if isinstance(argument, torch.device) else argument
