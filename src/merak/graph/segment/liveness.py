"""Liveness of a graph's values: batch-only operators, and every value's last use."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import fx

from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import Kind
from merak.graph.ir.mutation import Mutations, find_mutations
from merak.graph.ir.operators import family, weights_only
from merak.graph.ir.reachable import reachable
from merak.graph.ir.replicas import OF_REPLICAS
from merak.graph.trace.normalize import is_random


@dataclass(frozen=True, slots=True)
class Span:
    """Span of main nodes start … stop − 1, and the older values that they or later ones read."""

    start: int
    stop: int
    incoming: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Liveness:
    """Nodes of a graph in main and batch-only ones, and the lifetimes of main values.

    Args:
        main: nodes that depend on a parameter, draw random numbers, write into a tensor, or meet
            other replicas, which is done once.
        batch_only: the other operators: they depend on the batch and on buffers alone.
        last_use: per main node, the position in `main` of its last reader (its own if none).
        dying: per position, the earlier values read there for the last time.
        uncuttable: positions p where no cut may fall between p and p + 1.
    """

    main: tuple[fx.Node, ...]
    batch_only: tuple[fx.Node, ...]
    last_use: tuple[int, ...]
    dying: tuple[tuple[int, ...], ...]
    uncuttable: frozenset[int]

    def cut(self, span: Span, carried: frozenset[int], most: int = 1) -> list[Span]:
        """Cut a span wherever at most so many values, besides `carried`, live on to the next."""
        alive = dict.fromkeys(span.incoming)
        num_counted = sum(value not in carried for value in alive)
        parts = []
        start, incoming = span.start, span.incoming
        for position in range(span.start, span.stop):
            for value in self.dying[position]:
                if value in alive:
                    del alive[value]
                    num_counted -= value not in carried
            if self.last_use[position] > position:
                alive[position] = None
                num_counted += position not in carried
            is_last = position == span.stop - 1
            if not is_last and num_counted <= most and position not in self.uncuttable:
                parts.append(Span(start, position + 1, incoming))
                start, incoming = position + 1, tuple(alive)
        return [*parts, Span(start, span.stop, incoming)]


def analyze_liveness(graph: fx.Graph) -> Liveness:
    """Liveness of a graph: its main and batch-only operators, and every value's lifetime."""
    writes = find_mutations(graph)
    operators = [n for n in graph.nodes if n.op == "call_function"]
    main_set = _main(graph, operators, writes)
    main = tuple(n for n in operators if n in main_set)
    position = {node: i for i, node in enumerate(main)}
    last_use = list(range(len(main)))
    for i, node in enumerate(main):
        for source in node.all_input_nodes:
            if source in position:
                last_use[position[source]] = i
    joined = [0] * (len(main) + 1)
    weights = computed_weights(graph)
    for first, last in (*_unsendable(main, last_use, weights), *_written(writes, position)):
        joined[first] += 1
        joined[last] -= 1
    uncuttable = frozenset(i for i, depth in enumerate(accumulate(joined)) if depth > 0)
    batch_only = tuple(n for n in operators if n not in main_set)
    return Liveness(main, batch_only, tuple(last_use), _dying(last_use), uncuttable)


def _dying(last_use: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    found: list[list[int]] = [[] for _ in last_use]
    for made, last in enumerate(last_use):
        if last > made:
            found[last].append(made)
    return tuple(map(tuple, found))


def _main(graph: fx.Graph, operators: Sequence[fx.Node], writes: Mutations) -> set[fx.Node]:
    """Operators that depend on a parameter, random numbers, a mutated buffer, or other replicas.

    What is written in place is computed from the batch alone only if all that is written there is,
    and if nobody in the main part looks at it before the last write.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}

    def depending(node: fx.Node) -> Iterator[fx.Node]:
        yield from (*node.users, *writes.group(node))
        for source in node.all_input_nodes:
            writers = writes.writers.get(source.meta.get("storage", -1), ())
            if writers and order[node] < order[writers[-1]]:
                yield from writes.group(source)

    seeds = [n for n in graph.find_nodes(op="placeholder") if _is_seed(n, writes)]
    seeds += [n for n in operators if is_random(n) or n.target in OF_REPLICAS]
    return {n for n in reachable(seeds, depending) if n.op == "call_function"}


def _is_seed(placeholder: fx.Node, writes: Mutations) -> bool:
    kind = placeholder.meta["kind"]
    return kind is Kind.PARAMETER or placeholder.meta.get("storage") in writes.writers


def computed_weights(graph: fx.Graph) -> set[fx.Node]:
    """Values computed of parameters alone, as of a scaled weight, for one operator.

    Others of them may read the value, too, such as the next step of the same computation.
    """
    writes, alone = find_mutations(graph), weights_only(graph)
    readers: dict[fx.Node, set[fx.Node]] = {}
    found = set()
    for node in sorted(alone, reverse=True):
        behind = (readers[user] if user in alone else {user} for user in node.users)
        readers[node] = set().union(*behind)
        is_plain = node.op == "call_function" and not (is_random(node) or writes.group(node))
        reads_written = any(writes.group(source) for source in node.all_input_nodes)
        if is_plain and not reads_written and len(readers[node]) <= 1:
            found.add(node)
    return found


def _unsendable(
    main: Sequence[fx.Node], last_use: Sequence[int], weights: Collection[fx.Node]
) -> Iterator[tuple[int, int]]:
    """Lifetimes of tuples and plain numbers, which never leave their segment.

    Nor does a weight that is computed of parameters for one operator.
    """
    for i, node in enumerate(main):
        if node in weights or not isinstance(node.meta["tensor"], TensorMeta):
            yield i, last_use[i]


def is_detached_parameter(node: fx.Node) -> bool:
    """Whether a value is a parameter without its gradient."""
    if family(node.target) != "detach":
        return False
    source = node.all_input_nodes[0]
    return source.op == "placeholder" and source.meta["kind"] is Kind.PARAMETER


def _written(writes: Mutations, position: Mapping[fx.Node, int]) -> Iterator[tuple[int, int]]:
    """Lifetimes of mutated storages: from their first reader to the last mutation."""
    for memory, writers in writes.writers.items():
        members = writes.members[memory]
        seen = [position[n] for m in members for n in (m, *m.users) if n in position]
        if seen and writers[-1] in position:
            yield min(seen), position[writers[-1]]
