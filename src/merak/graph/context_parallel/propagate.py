"""Propagation of the tokens' shards through a segment.

Columns and what depends on them alone are whole on every rank. A value is sharded over tokens where
the first look-up or product makes one of a column, and stays so through every operator that the
rules let run on shards; another gets gathered tokens, is computed by every rank, and is reported.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from torch import fx

from merak.core.errors import ShardError
from merak.graph.context_parallel.arranged import Arrangements, NotARoundTripError, counts_up
from merak.graph.context_parallel.rules import RULES
from merak.graph.ir.ir import Kind, returned_nodes
from merak.graph.ir.mutation import is_mutating, mutated_arguments
from merak.graph.ir.operators import GEMM_OPERANDS, MATMULS, family
from merak.graph.tensor_parallel.placement import (
    REPLICATE,
    REPLICATE_PARTIAL_GRAD,
    Decision,
    Operator,
    Placement,
    ResultPlacement,
    Shard,
    shape_of,
)
from merak.graph.tensor_parallel.propagate import (
    Propagation,
    decide_or_gather,
    propagate_once,
    reduce_early,
)
from merak.graph.tensor_parallel.rewrite import Rewriter, check_shapes
from merak.graph.tensor_parallel.rules.rules import decide

CONTEXT_AXIS = "cp"
"""The mesh axis of the ranks that share tokens."""


@dataclass(frozen=True, slots=True)
class ContextPropagation:
    """Placements of a segment's values under context parallelism.

    Args:
        propagation: their placements.
        gathered: operators that get gathered tokens.
        products: the products with weights, by whether they run on shards.
    """

    propagation: Propagation
    gathered: tuple[fx.Node, ...]
    products: Mapping[fx.Node, bool]


def propagate_tokens(
    graph: fx.Graph,
    entering: Mapping[fx.Node, Placement],
    whole: Collection[fx.Node],
    lengths: Collection[int],
    degree: int,
    counting: Collection[str] = (),
) -> ContextPropagation:
    """Propagate the tokens' shards through a segment.

    Args:
        graph: the segment's operators, those of a tensor parallel rank.
        entering: placements of values of other segments.
        whole: results that must leave whole: what the model returns.
        lengths: numbers of tokens that columns have.
        degree: the number of ranks.
        counting: batch-only values that are 0, 1, 2, ….

    Raises:
        ShardError: a write into a value that is sharded.
    """
    weights: dict[str, Placement] = {
        node.meta["name"]: REPLICATE_PARTIAL_GRAD
        for node in graph.find_nodes(op="placeholder")
        if node.meta["kind"] is Kind.PARAMETER
    }
    rules: list[_ContextRule] = []

    returned = returned_nodes(graph)
    known = frozenset(
        n for n in graph.nodes if counts_up(n) or (n.meta.get("name") in counting and not n.args)
    )
    refused, written = set[fx.Node](), set[fx.Node]()

    def run_once(reduced: Collection[fx.Node]) -> Propagation:
        rules.append(_ContextRule(lengths, Arrangements(frozenset(refused), known), written))
        found = propagate_once(
            graph, weights, degree, rules[-1], (), entering, reduced, CONTEXT_AXIS
        )
        for node in returned:
            if node in rules[-1].arrangements.known:
                raise NotARoundTripError(rules[-1].arrangements.known[node].sort)
        return found

    def run(reduced: Collection[fx.Node]) -> Propagation:
        while True:
            try:
                return run_once(reduced)
            except NotARoundTripError as error:
                refused.add(error.sort)
            except _WrittenWholeError as error:
                written.add(error.made)

    found = reduce_early(graph, run)
    outputs: dict[fx.Node, Placement] = {}
    for node, placed in found.placements.items():
        if node not in whole and not isinstance(placed, tuple):
            outputs[node] = placed
    propagation = replace(found, outputs=outputs, scatters=True, exchanges=True)
    return ContextPropagation(propagation, tuple(rules[-1].gathered), _products(propagation))


def _products(found: Propagation) -> dict[fx.Node, bool]:
    """Products of activations with weights, by whether they run on shards."""
    named = {}
    for node in found.decisions:
        operands = GEMM_OPERANDS.get(family(node.target))
        if operands is None:
            continue
        x = node.args[operands.x]
        placed = found.placements[node]
        if isinstance(x, fx.Node) and x.meta["tensor"].requires_grad:
            named[node] = isinstance(placed, Shard)
    return named


def rewrite_tokens(graph: fx.Graph, found: ContextPropagation, degree: int) -> fx.Graph:
    """Graph that a rank runs on its tokens.

    Args:
        graph: the segment's graph; left as it is.
        found: what becomes of its operators.
        degree: the number of ranks.
    """
    rewriter = _ContextRewriter(found.propagation, degree, CONTEXT_AXIS)
    new = rewriter.run(graph)
    check_shapes(rewriter.split)
    return new


class _ContextRewriter(Rewriter):
    """Rewriter that leaves gradients of weights to the reduction over all replicas."""

    def enter(self, node: fx.Node) -> None:
        """Nothing: a weight's gradient is this rank's summand."""


class _WrittenWholeError(Exception):
    """A write that mixes tokens, into a value that must be whole for it.

    Args:
        made: the operator that makes the value.
    """

    def __init__(self, made: fx.Node) -> None:
        super().__init__(made)
        self.made = made


class _ContextRule:
    """Sharding rule of operators on a rank's tokens.

    Args:
        lengths: numbers of tokens that columns have.
        arrangements: what is known of values in a rank's own order.
        written: operators that make values which later writes need whole.
    """

    def __init__(
        self, lengths: Collection[int], arrangements: Arrangements, written: Collection[fx.Node]
    ) -> None:
        self.lengths = lengths
        self.arrangements = arrangements
        self.written = written
        self.gathered: list[fx.Node] = []
        self.landing: dict[fx.Node, Shard] = {}
        """Values that are whole because an operator got gathered tokens, and how they may lie."""

    def __call__(self, op: Operator) -> Decision:
        operands = op.node.all_input_nodes
        if op.node in self.written:
            return self._gather(op)
        arranged = self.arrangements(op)
        if arranged is not None:
            return arranged
        if any(isinstance(p, tuple) for p in (op.placements[n] for n in operands)):
            return decide(op)
        if op.sharded():
            return self._on_shards(op)
        landed: dict[fx.Node, ResultPlacement] = {
            n: self.landing[n] for n in operands if n in self.landing
        }
        landed = landed or self._seeds(op)
        if landed and not is_mutating(op.node):
            decision = self._landed(op, landed)
            if decision is not None:
                return decision
        decision = decide_or_gather(op)
        self._note(op, {n: p for n, p in landed.items() if isinstance(p, Shard)})
        return decision

    def _on_shards(self, op: Operator) -> Decision:
        own = RULES.get(family(op.node.target))
        try:
            decision = own(op) if own is not None else None
            return decision or decide(op)
        except ShardError as error:
            target = next(iter(mutated_arguments(op.node)), None)
            if target is not None and isinstance(op.placement(target), Shard):
                return self._write(op, target, error)
            self._note(op, op.sharded())
            return self._gather(op)

    def _gather(self, op: Operator) -> Decision:
        """Decision of an operator that every rank computes for all tokens."""
        self.gathered.append(op.node)
        return Decision(REPLICATE, dict.fromkeys(op.sharded(), REPLICATE))

    def _write(self, op: Operator, target: fx.Node, error: ShardError) -> Decision:
        """Decision of a write into a rank's tokens: of whole values, unless it mixes tokens.

        Raises:
            _WrittenWholeError: it does.
            ShardError: it does, and what it writes into comes from another segment.
        """
        others = {n: REPLICATE for n in op.sharded() if n is not target}
        try:
            decision = decide(op.placed_as(others))
        except ShardError:
            storage = target.meta.get("storage")
            members = (n for n in target.graph.nodes if n.meta.get("storage") == storage)
            made = target if storage is None else next(members)
            if made.op != "call_function" or made in self.written:
                raise error from None
            raise _WrittenWholeError(made) from None
        self.gathered.append(op.node)
        return replace(decision, needs={**others, **decision.needs})

    def _landed(self, op: Operator, landed: Mapping[fx.Node, ResultPlacement]) -> Decision | None:
        """Decision on slices of whole values; None where the operator must see them whole."""
        trial = op.placed_as(landed)
        own = RULES.get(family(op.node.target))
        try:
            decision = (own(trial) if own is not None else None) or decide(trial)
        except ShardError:
            return None
        if not isinstance(decision.output, (Shard, tuple)):
            return None
        needs = {n: p for n, p in landed.items() if isinstance(p, Shard)} | dict(decision.needs)
        return replace(decision, needs=needs)

    def _seeds(self, op: Operator) -> dict[fx.Node, ResultPlacement]:
        """Whole operands of the first operator that makes a value of each token."""
        name = family(op.node.target)
        if name in ("embedding", "vocab_parallel_embedding"):
            indices = op.arg("indices")
            return self._tokens_of(indices, len(shape_of(indices)) - 1)
        operands = GEMM_OPERANDS.get(name)
        if operands is None or name in MATMULS:
            return {}
        x = op.node.args[operands.x]
        is_batch = isinstance(x, fx.Node) and not x.meta["tensor"].requires_grad
        return self._tokens_of(x, 1) if is_batch and len(shape_of(x)) > 2 else {}

    def _tokens_of(self, node: object, dim: int) -> dict[fx.Node, ResultPlacement]:
        shape = shape_of(node)
        if not isinstance(node, fx.Node) or len(shape) < 2 or shape[dim] not in self.lengths:
            return {}
        return {node: Shard(dim, (shape[dim],))}

    def _note(self, op: Operator, shards: Mapping[fx.Node, Shard]) -> None:
        """Remember how a result may be sharded again that is computed of gathered tokens."""
        result = shape_of(op.node)
        for node, placed in shards.items():
            shape = shape_of(node)
            if len(shape) == len(result) and result[placed.dim] == shape[placed.dim]:
                self.landing[op.node] = Shard(placed.dim, placed.parts)
