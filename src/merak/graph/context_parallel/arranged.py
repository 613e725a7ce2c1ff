"""Rows that a rank arranges by itself, as experts' implementations sort tokens by their expert.

Sorting a rank's own rows gives a permutation of its own. What it picks, weighs and multiplies in
that order stays with the rank until the inverse of the same permutation, or a sum into the rows
that it names, brings the rows back. Only such round trips are run so: any other reader of an
arranged value makes the sort see all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from torch import fx

from merak.core.errors import ShardError
from merak.graph.context_parallel.rules import COLLECTIVES
from merak.graph.ir.operators import (
    CONVERSIONS,
    CUMULATIVE,
    FILLS_LIKE,
    GROUPED_GEMMS,
    SAME_VALUES,
    SEPARATE_EXPERTS,
    family,
)
from merak.graph.tensor_parallel.placement import (
    REPLICATE,
    REPLICATE_PARTIAL_GRAD,
    Decision,
    Operator,
    Placement,
    Shard,
    argument,
    positive,
    shape_of,
)
from merak.graph.tensor_parallel.rules.rules import decide
from merak.ops.context_parallel import inverse_permutation
from merak.ops.expert_rows import enter_experts, leave_experts, pick_expert_rows


class Meaning(Enum):
    """Meaning of a value that depends on a rank's own order."""

    ROWS = auto()
    """Rows in that order."""
    EXPERT_ROWS = auto()
    """Such rows, of which those of a tensor parallel rank's own experts come first."""
    PERMUTATION = auto()
    """The place of each in the rank's rows."""
    SOURCES = auto()
    """The places, divided by how often each token was repeated."""
    INVERSE = auto()
    """The permutation that brings the rows back."""
    SCRATCH = auto()
    """Memory to be filled with it."""
    COUNTS = auto()
    """Numbers of rows, or where groups of them end."""


@dataclass(frozen=True, slots=True)
class Arranged:
    """A value in a rank's own order.

    Args:
        meaning: of its numbers.
        sort: the operator that made the order.
        times: rows of a token, for `SOURCES`.
    """

    meaning: Meaning
    sort: fx.Node
    times: int = 1


class NotARoundTripError(Exception):
    """A reader of a rank's own order that must see all tokens.

    Args:
        sort: the operator that must see them in its place.
    """

    def __init__(self, sort: fx.Node) -> None:
        super().__init__(sort.name)
        self.sort = sort


class Arrangements:
    """Values of a segment that are in a rank's own order, as rows sorted by expert are.

    Args:
        refused: sorts that see all tokens.
        counting: values that are 0, 1, 2, ….
    """

    def __init__(self, refused: frozenset[fx.Node], counting: frozenset[fx.Node]) -> None:
        self.refused = refused
        self.counting = counting
        self.known: dict[fx.Node, Arranged] = {}

    def __call__(self, op: Operator) -> Decision | None:
        """Decision about an operator on such values; None where it has none.

        Raises:
            NotARoundTripError: it needs more than the rank's own rows.
        """
        node, name = op.node, family(op.node.target)
        if name == "getitem":
            return self._getitem(op)
        own = {n: self.known[n] for n in node.all_input_nodes if n in self.known}
        if not own:
            return self._sort(op) if name in ("sort", "argsort") else None
        sort = next(iter(own.values())).sort
        if any(arranged.sort is not sort for arranged in own.values()):
            raise NotARoundTripError(sort)
        rule = _RULES.get(name, _each_row)
        if name in ("index_put", "index_put_") and node.args[2] not in self.counting:
            raise NotARoundTripError(sort)
        try:
            found = rule(op, own)
        except ShardError as error:
            raise NotARoundTripError(sort) from error
        if found is None:
            raise NotARoundTripError(sort)
        decision, meaning = found
        if meaning is not None:
            self.known[node] = meaning
        return decision

    def _sort(self, op: Operator) -> Decision | None:
        """sort and argsort of a rank's rows."""
        operand = op.node.args[0]
        placed = op.placement(operand)
        is_row = len(shape_of(operand)) == 1
        if not isinstance(placed, Shard) or not is_row or op.node in self.refused:
            return None
        if family(op.node.target) == "argsort":
            self.known[op.node] = Arranged(Meaning.PERMUTATION, op.node)
            return Decision(placed)
        return Decision((placed, placed))

    def _getitem(self, op: Operator) -> Decision | None:
        source, index = op.node.args
        assert isinstance(source, fx.Node)
        if source in self.known:
            self.known[op.node] = self.known[source]
        elif family(source.target) == "sort" and isinstance(op.placements[source], tuple):
            is_own = len(shape_of(op.node)) == 1 and source not in self.refused
            placed = op.placements[source]
            if is_own and isinstance(placed, tuple) and isinstance(placed[0], Shard):
                meaning = Meaning.PERMUTATION if index else Meaning.ROWS
                self.known[op.node] = Arranged(meaning, source)
        return None


def counts_up(node: fx.Node) -> bool:
    """Whether an operator yields 0, 1, 2, …."""
    if node.op != "call_function" or family(node.target) != "arange":
        return False
    first = node.args[0] if len(node.args) > 1 else 0
    step = node.args[2] if len(node.args) > 2 else 1
    return (first, step) == (0, 1)


Own = Mapping[fx.Node, Arranged]
Found = tuple[Decision, Arranged | None] | None


def _only(own: Own, *meanings: Meaning) -> bool:
    return all(arranged.meaning in meanings for arranged in own.values())


def _sort_of(own: Own) -> fx.Node:
    return next(iter(own.values())).sort


def _each_row(op: Operator, own: Own) -> Found:
    """An operator that works on each row by itself, or on each number of a count."""
    if _only(own, Meaning.COUNTS):
        needs = {n: op.placements[n] for n in own}
        return Decision(REPLICATE, dict(needs)), Arranged(Meaning.COUNTS, _sort_of(own))  # type: ignore[arg-type]
    meaning = next(iter(own.values())).meaning
    name = family(op.node.target)
    if meaning is Meaning.PERMUTATION and name in FILLS_LIKE:
        return decide(op), Arranged(Meaning.SCRATCH, _sort_of(own))
    are_rows = meaning in (Meaning.ROWS, Meaning.EXPERT_ROWS)
    keeps = are_rows or name in SAME_VALUES | CONVERSIONS
    others = [n for n in op.node.all_input_nodes if n not in own]
    if not keeps or not _only(own, meaning) or any(n in op.sharded() for n in others):
        return None
    decision = decide(op)
    rows = [op.placement(n) for n in own]
    results = decision.output if isinstance(decision.output, tuple) else (decision.output,)
    if any(not isinstance(r, Shard) or r.dim or r != rows[0] for r in results) or any(
        isinstance(decision.needs.get(n), Shard) for n in others
    ):
        return None
    return decision, next(iter(own.values()))


def _quotient(op: Operator, own: Own) -> Found:
    operand, times = op.node.args[:2]
    if not _only(own, Meaning.PERMUTATION):
        return _each_row(op, own)
    if operand not in own or not isinstance(times, int):
        return None
    if family(op.node.target) == "div" and op.arg("rounding_mode") != "floor":
        return None
    placed = op.placement(operand)
    return Decision(placed), Arranged(Meaning.SOURCES, _sort_of(own), times)


def _index(op: Operator, own: Own) -> Found:
    """Rows picked in the rank's order, or brought back; rows of a table by their number."""
    args: Any = op.node.args
    operand, indices = args[:2]
    if len(indices) != 1 or indices[0] not in own:
        return None
    by = own[indices[0]]
    rows, placed = op.placement(indices[0]), op.placement(operand)
    if len(shape_of(indices[0])) != 1 or not isinstance(rows, Shard):
        return None
    there = Arranged(Meaning.ROWS, by.sort)
    if operand in own:
        is_back = by.meaning is Meaning.INVERSE and own[operand].meaning is Meaning.ROWS
        return (Decision(rows), None) if is_back and placed == rows else None
    if by.meaning is Meaning.ROWS and placed == REPLICATE:
        return Decision(rows, {operand: REPLICATE_PARTIAL_GRAD}), there
    if by.meaning not in (Meaning.PERMUTATION, Meaning.SOURCES) or not isinstance(placed, Shard):
        return None
    parts = tuple(size * by.times for size in placed.parts)
    return (Decision(rows), there) if placed.dim == 0 and parts == rows.parts else None


def _inverse(op: Operator, own: Own) -> Found:
    """index_put of 0, 1, 2, … at a permutation: its inverse."""
    args: Any = op.node.args
    operand, indices, values, *accumulates = args
    permutation = indices[0]
    is_scratch = own.get(operand) == Arranged(Meaning.SCRATCH, _sort_of(own))
    if len(indices) != 1 or not is_scratch or len(operand.users) != 1 or any(accumulates):
        return None
    if own.get(permutation) != Arranged(Meaning.PERMUTATION, _sort_of(own)):
        return None
    if shape_of(values) != shape_of(permutation):
        return None
    placed = op.placement(permutation)
    decision = Decision(placed, {}, inverse_permutation, (permutation,), {})
    return decision, Arranged(Meaning.INVERSE, _sort_of(own))


def _sorted_again(op: Operator, own: Own) -> Found:
    """argsort of a permutation: its inverse."""
    if not _only(own, Meaning.PERMUTATION) or op.arg("descending", False):
        return None
    return Decision(op.placement(op.node.args[0])), Arranged(Meaning.INVERSE, _sort_of(own))


def _counted(op: Operator, own: Own) -> Found:
    """histc, bincount: how many rows have each number."""
    if not _only(own, Meaning.ROWS) or op.node.args[0] not in own:
        return None
    needs: dict[fx.Node, Placement] = {n: _placed(op, n) for n in own}
    return Decision(REPLICATE, needs), Arranged(Meaning.COUNTS, _sort_of(own))


def _placed(op: Operator, node: fx.Node) -> Placement:
    placed = op.placements[node]
    assert not isinstance(placed, tuple)
    return placed


def _running(op: Operator, own: Own) -> Found:
    return _each_row(op, own) if _only(own, Meaning.COUNTS) else None


def _grouped(op: Operator, own: Own) -> Found:
    """Products of groups of rows that lie one behind another."""
    args: Any = op.node.args
    x, weight, *rest = args
    weights = weight if isinstance(weight, (list, tuple)) else [weight]
    offsets = rest[0] if rest else op.arg("offs")
    placed, by = op.placement(x), own.get(x)
    is_counted = own.get(offsets) == Arranged(Meaning.COUNTS, _sort_of(own))
    if by is None or not is_counted or own.keys() & set(weights):
        return None
    if by.meaning not in (Meaning.ROWS, Meaning.EXPERT_ROWS) or not isinstance(placed, Shard):
        return None
    needs: dict[fx.Node, Placement] = dict.fromkeys(weights, REPLICATE_PARTIAL_GRAD)
    needs[offsets] = _placed(op, offsets)
    of_own_experts = argument(op.node, "axis") is not None
    meaning = Meaning.EXPERT_ROWS if of_own_experts else Meaning.ROWS
    return Decision(Shard(0, placed.parts), needs), Arranged(meaning, _sort_of(own))


def _rotated(before: Meaning, after: Meaning) -> Callable[[Operator, Own], Found]:
    """Rows that enter or leave the experts of a tensor parallel rank."""

    def rule(op: Operator, own: Own) -> Found:
        rows, offsets = op.node.args[:2]
        sort = _sort_of(own)
        if own.get(rows) != Arranged(before, sort):  # type: ignore[arg-type]
            return None
        if own.get(offsets) != Arranged(Meaning.COUNTS, sort):  # type: ignore[arg-type]
            return None
        needs: dict[fx.Node, Placement] = {n: _placed(op, n) for n in own}
        return Decision(op.placement(rows), needs), Arranged(after, sort)

    return rule


def _picked(op: Operator, own: Own) -> Found:
    """The own experts' values, as biases, for the rows of each."""
    values, experts = op.node.args[:2]
    if own.keys() != {experts} or not _only(own, Meaning.ROWS):
        return None
    needs: dict[fx.Node, Placement] = {values: REPLICATE_PARTIAL_GRAD}  # type: ignore[dict-item]
    return Decision(op.placement(experts), needs), Arranged(Meaning.EXPERT_ROWS, _sort_of(own))


def _collective(op: Operator, own: Own) -> Found:
    """Collectives of tensor parallel ranks, which have the same rows."""
    (arranged,), placed = own.values(), op.placement(op.node.args[0])
    if isinstance(placed, Shard) and op.arg("dim") == placed.dim:
        return None
    return Decision(placed), arranged


def _summed_back(op: Operator, own: Own) -> Found:
    """index_add of rows into the tokens that they come from."""
    into, dim, index, source = (op.arg(n) for n in ("self", "dim", "index", "source"))
    placed, rows = op.placement(into), op.placement(index)
    if not isinstance(rows, Shard) or positive(dim, len(shape_of(into))) != 0:
        return None
    by = own.get(index)
    if by is None or own.get(source) != Arranged(Meaning.ROWS, _sort_of(own)) or into in own:
        return None
    if by.meaning not in (Meaning.PERMUTATION, Meaning.SOURCES) or not isinstance(placed, Shard):
        return None
    parts = tuple(size * by.times for size in placed.parts)
    return (Decision(placed), None) if placed.dim == 0 and parts == rows.parts else None


_RULES: Mapping[str, Callable[[Operator, Own], Found]] = {
    "index": _index,
    "index_put": _inverse,
    "index_put_": _inverse,
    "argsort": _sorted_again,
    **dict.fromkeys(("floor_divide", "div"), _quotient),
    **dict.fromkeys(("histc", "bincount"), _counted),
    **dict.fromkeys(CUMULATIVE, _running),
    **dict.fromkeys(GROUPED_GEMMS | SEPARATE_EXPERTS, _grouped),
    **dict.fromkeys(("index_add", "index_add_"), _summed_back),
    enter_experts.__name__: _rotated(Meaning.ROWS, Meaning.EXPERT_ROWS),
    leave_experts.__name__: _rotated(Meaning.EXPERT_ROWS, Meaning.ROWS),
    pick_expert_rows.__name__: _picked,
    **dict.fromkeys(COLLECTIVES, _collective),
}
"""Operators that make, use or undo an order; others work on each row."""
