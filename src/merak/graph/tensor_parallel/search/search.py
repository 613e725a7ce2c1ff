"""Search for the sharding of one segment's weights: few collectives, many sharded parameters.

A seed splits the outputs of one GEMM. What the operators then need, and what the weights before and
after must be for it, is read off their placements (`propagate`): the queries' heads ask
for the keys' and values', these for the inputs of the projection, and so on. Such a closed group of
weights is taken where it costs less than it saves.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import sympy  # type: ignore[import-untyped]
from torch import fx

from merak.core.errors import ShardError
from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import Segment
from merak.graph.ir.operators import NORMS, family, weights_only
from merak.graph.tensor_parallel.placement import (
    REPLICATE_PARTIAL_GRAD,
    ExpertRows,
    PartlySharded,
    Placement,
    Shard,
    shape_of,
)
from merak.graph.tensor_parallel.propagate import (
    Propagation,
    capacities,
    decide_or_gather,
    first_dims,
    propagate,
    weight_ways,
)
from merak.graph.tensor_parallel.rewrite import rewrite
from merak.graph.tensor_parallel.search.cost import (
    FORWARD,
    Collective,
    Transfer,
    active_share,
    conversions,
    has_gradient,
    parameter_nodes,
    transfers,
)
from merak.graph.tensor_parallel.search.experts import experts_of
from merak.graph.tensor_parallel.search.fused import divides, fused_parts, stacked_parts
from merak.graph.tensor_parallel.search.segment_facts import (
    activation_tokens,
    ancestors,
    depth_of,
    gradient_sources,
    largest_value,
    num_streams,
)

Assignment = Mapping[str, Placement]
_Layout = tuple[frozenset[tuple[str, Placement]], frozenset[fx.Node]]

SAVED_PER_BLOCK = 4.0
"""Gain of splitting all weights of a block, in collectives of a whole activation."""

_OF_A_BLOCK = 1 / 64
"""Size from which weights gain as a block's do, in square matrices of the activation's features.

Smaller ones gain in proportion: to sum an activation for a router of few outputs does not pay.
"""

_OF_WEIGHTS = 0.01
"""Cost of all-reducing the gradient of a small whole weight, besides its size."""

_OF_POSITIONS = 0.1
"""Least cost of all-reducing a few numbers for each position, inside an operator."""

_OF_ONE = 0.25
"""Least cost of reducing a number for each position, as of a norm's mean square over all heads."""

_ROUNDS = 12
"""How many steps a group of weights may spread: from one weight to the next."""


@dataclass(frozen=True, slots=True)
class Found:
    """Sharding found for the weights of a segment.

    Args:
        weights: placements by parameter name; parameters not named are replicated.
        inside: operators on whole values that count to the work that is split.
        transfers: the collectives that the segment then runs.
        value: the cost that was minimised.
    """

    weights: Assignment
    inside: frozenset[fx.Node]
    transfers: tuple[Transfer, ...]
    value: float


class Search:
    """Search over one segment, with its intermediate results.

    Args:
        segment: the segment.
        parameters: what every parameter is, by name.
        degree: the number of ranks.
        replicated: parameters that are not to be split.
        fixed: parameters whose placement is given.
    """

    def __init__(
        self,
        segment: Segment,
        parameters: Mapping[str, TensorMeta],
        degree: int,
        replicated: Collection[str],
        fixed: Assignment,
    ) -> None:
        self.segment = segment
        self.graph = segment.graph
        self.degree = degree
        self.nodes = parameter_nodes(self.graph)
        self.shapes = {name: parameters[name].shape for name in self.nodes}
        self.free = frozenset(n for n in self.nodes if n not in replicated and n not in fixed)
        self.fixed = dict(fixed)
        self.scale = math.prod(largest_value(segment))
        self._weights = weights_only(self.graph)
        ways = {n: weight_ways(node, self._weights) for n, node in self.nodes.items()}
        self.dims = {n: first_dims(own) for n, own in ways.items()}
        self.outs = {n: list(dict.fromkeys(d for o, _ in w for d in o)) for n, w in ways.items()}
        self.tokens = activation_tokens(segment)
        self._gemm_share = self._gemm_shares(self.tokens)
        num_blocks = max(1, math.ceil(depth_of(self.graph) / 2)) * num_streams(segment)
        self.gain = SAVED_PER_BLOCK * min(num_blocks, self._num_squares() / _OF_A_BLOCK)
        self._above = ancestors(self.graph)
        self._place = {node: i for i, node in enumerate(self.graph.nodes)}
        self._values = gradient_sources(self.graph, self._place)
        self._layouts: dict[_Layout, Propagation | None] = {}
        self._splits: dict[str, tuple[Shard | PartlySharded, ...]] = {}

    def _gemm_shares(self, tokens: int) -> dict[str, float]:
        """Fraction of the segment's work or of its memory that each weight is, the larger one."""
        sizes = {n: math.prod(self.shapes[n]) for n in self.nodes if self.dims[n]}
        work = {n: size * active_share(self.nodes[n], tokens) for n, size in sizes.items()}
        size_sum, work_sum = sum(sizes.values()) or 1, sum(work.values()) or 1
        return {n: max(sizes[n] / size_sum, work[n] / work_sum) for n in sizes}

    def _num_squares(self) -> float:
        """Size of the weights of GEMMs, in those of a square one of the activation's features."""
        weights = sum(math.prod(self.shapes[name]) for name, dims in self.dims.items() if dims)
        return float(weights / largest_value(self.segment)[-1] ** 2)

    def run(self, followers: Collection[str] = ()) -> Found:
        """Best assignment found.

        Args:
            followers: weights that are split only together with others.
        """
        best = self.judge(self.fixed)
        if best is None:
            layout = propagate(self.graph, self.fixed, self.degree)
            transfers(self.graph, layout)  # one of them raises, and says where
        assert best is not None
        best = self._enter_earlier(best)
        seeds = sorted(self.free - frozenset(followers))
        groups = sorted(self._groups(seeds), key=lambda found: found.value)
        for _ in range(2):
            for group in groups:
                for weights in _joined(group.weights, best.weights):
                    found = self._better(best, weights)
                    if found is not best and self.runs(group.weights):
                        best = found
        for name in [n for n in best.weights if n not in self.fixed]:
            best = self._better(best, {n: p for n, p in best.weights.items() if n != name})
        return best

    def limits(self) -> dict[str, int]:
        """Number of pieces that the outputs of each free weight can be cut into."""
        found: dict[str, int] = {}
        for name in sorted(self.free):
            for out in self.outs[name]:
                along = [split for split in self.splits(name) if split.dim == out]
                # Parts of which only the small ones are read cannot be split with these whole.
                *_, finest = (split for split in along if isinstance(split, Shard))
                for split in dict.fromkeys((along[-1], finest)):
                    if (pieces := self._pieces(name, split)) is not None:
                        found[name] = max(pieces, found.get(name, 0))
                        break
        return found

    def _pieces(self, name: str, split: Shard | PartlySharded) -> int | None:
        """Number of pieces that a sharded weight's outputs can be cut into; None where none is."""
        try:
            layout = propagate(self.graph, {name: split}, 1, decide_or_gather)
        except ShardError:
            return None
        return capacities(layout).get(name)

    def _better(self, best: Found, weights: Assignment) -> Found:
        if weights == best.weights:
            return best
        found = self.judge(weights)
        if found is None or found.value - self._late_price(found) >= best.value:
            return best
        return self._cheaper(best, self._enter_earlier(found))

    def _late_price(self, found: Found) -> float:
        """Largest saving of `_enter_earlier`."""
        late = (t for t in found.transfers if t.kind not in FORWARD and not t.of_weights)
        return sum(map(self.price, late))

    def _cheaper(self, best: Found, found: Found | None) -> Found:
        is_better = found is not None and found.value < best.value - 1e-9
        return found if found is not None and is_better else best

    def _groups(self, seeds: Collection[str]) -> Iterator[Found]:
        seen: list[Assignment] = []
        for name in seeds:
            for out in self._output_dims(name):
                for split in self.splits(name):
                    if split.dim != out:
                        continue
                    weights = self.close({**self.fixed, name: split})
                    found = None if weights in seen else self.judge(weights)
                    seen.append(weights)
                    if found is not None:
                        yield found
        whole = self.close({**self.fixed, **self._whole_experts()})
        found = None if whole in seen or len(whole) == len(self.fixed) else self.judge(whole)
        if found is not None:
            yield found

    def _output_dims(self, name: str) -> list[int]:
        """Dims of a weight by which its outputs are split: of GEMMs, and those that a norm scales.

        A norm over a sharded dim follows from its weight: a whole one has its operand gathered.
        """
        users = self.nodes[name].users
        scales = any(family(user.target) in NORMS for user in users)
        return [*self.outs[name], *[0] * scales]

    def _whole_experts(self) -> dict[str, Placement]:
        """Stacks of experts that cannot be split inside each, by experts instead."""
        experts = {
            name: weight
            for name, weight in experts_of(self.segment).items()
            if name in self.free and weight.expert is None
        }
        if self.degree == 1 or any(w.num_experts % self.degree for w in experts.values()):
            return {}
        if all(map(self._splits_both_ways, experts)):
            return {}
        return {name: weight.placed(name, self.degree) for name, weight in experts.items()}

    def _splits_both_ways(self, name: str) -> bool:
        """Whether the degree divides the outputs and the inputs of a weight."""
        sizes = self.shapes[name]
        dims = {split.dim for split in self.splits(name) if sizes[split.dim] % self.degree == 0}
        ways = self.dims[name]
        if not ways:  # one by one values of each expert, or a part of a stack that is computed
            return len(sizes) < 3
        return all({out, into} <= dims for out, into in ways)

    def close(self, weights: Assignment) -> Assignment:
        """Shard further weights as the operators on sharded values need them."""
        chosen = dict(weights)
        for _ in range(_ROUNDS):
            layout = self.propagate(chosen)
            if layout is None:
                break
            before = len(chosen)
            for node, need in conversions(self.graph, layout):
                if isinstance(need, PartlySharded) or (
                    isinstance(need, Shard) and self._fits(need, weights)
                ):
                    chosen |= self._sources(node, need, chosen)
            if len(chosen) == before:
                break
        return chosen

    def _fits(self, need: Shard, weights: Assignment) -> bool:
        """Whether weights may be sharded so: evenly, or like a vocabulary with padding."""
        if divides(need, self.degree):
            return True
        return any(isinstance(p, Shard) and p.parts == need.parts for p in weights.values())

    def _sources(
        self, node: fx.Node, need: Shard | PartlySharded, chosen: Assignment
    ) -> dict[str, Placement]:
        """Weights that give a value the placement it needs."""
        found: dict[str, Placement] = {}
        for name in sorted(self._above[node] & self.free):
            if name in chosen:
                continue
            sizes = enumerate(self.shapes[name])
            like = [replace(need, dim=dim) for dim, n in sizes if n == sum(need.parts)]
            for split in (*self.splits(name), *like):
                layout = self.propagate({name: split})
                if layout is not None and layout.placements[node] == need:
                    found[name] = replace(split, origin=name)
                    break
        return found

    def _enter_earlier(self, best: Found) -> Found:
        """Enter sharded work with one value in place of several made from it."""
        for _ in range(_ROUNDS):
            before = best
            late = self._late(best)
            for source, ends in self._common(late):
                inside = best.inside | self._between(source, ends)
                if inside != best.inside:
                    best = self._cheaper(best, self.judge(best.weights, inside))
            if best is before:
                break
        return best

    def _late(self, best: Found) -> dict[fx.Node, None]:
        """Replicated activations whose gradients the ranks all-reduce or gather.

        In the order of the graph: of equal prices the first wins, on every rank the same.
        """
        layout = self.propagate(best.weights, best.inside)
        assert layout is not None
        return {
            node: None
            for node, need in conversions(self.graph, layout)
            if need == REPLICATE_PARTIAL_GRAD
            or (
                isinstance(need, (Shard, ExpertRows))
                and layout.placements[node] != REPLICATE_PARTIAL_GRAD
                and not isinstance(layout.placements[node], Shard)
                and has_gradient(node)
                and node not in self._weights
            )
        }

    def _common(self, late: Collection[fx.Node]) -> Iterator[tuple[fx.Node, frozenset[fx.Node]]]:
        """Latest values from which the same of some others are made: two or more, or a larger one.

        As of experts, which read every token several times.
        """
        seen: set[tuple[frozenset[fx.Node], int]] = set()
        for node in reversed(self.graph.nodes):
            if node in self._weights or not has_gradient(node):
                continue
            reached = [n for n in late if n is node or self._is_made_from(n, node)]
            size = math.prod(shape_of(node))
            larger = [frozenset((n,)) for n in reached if size < math.prod(shape_of(n))]
            # Of one value, side inputs come first, which are no use: one of each size is tried.
            kinds = [(frozenset(reached), 0)] if len(reached) > 1 else []
            for kind in (*kinds, *((ends, size) for ends in larger)):
                if kind not in seen:
                    seen.add(kind)
                    yield node, kind[0]

    def _between(self, source: fx.Node, ends: Collection[fx.Node]) -> frozenset[fx.Node]:
        return frozenset(
            node
            for node in self.graph.nodes
            if self._is_made_from(node, source)
            and (node in ends or any(self._is_made_from(end, node) for end in ends))
        )

    def _is_made_from(self, node: fx.Node, source: fx.Node) -> bool:
        return bool(self._values[node] >> self._place[source] & 1)

    def splits(self, name: str) -> tuple[Shard | PartlySharded, ...]:
        """Candidate placements of a parameter that the degree divides."""
        if name not in self._splits:
            found: list[Shard] = []
            for dim, size in enumerate(self.shapes[name]):
                all_parts: list[tuple[int, ...]] = [(size,)]
                if dim in self.outs[name]:
                    all_parts = fused_parts(self.graph, name, dim, size)
                all_parts += stacked_parts(self.nodes[name], dim)
                found += [Shard(dim, parts, name) for parts in all_parts]
            mixed = (m for s in found if (m := _small_parts_whole(s, self.degree)))
            shared = (g for s in found if (g := self._in_groups(name, s)))
            whole = (s for s in found if divides(s, self.degree))
            self._splits[name] = (*whole, *mixed, *shared)
        return self._splits[name]

    def _in_groups(self, name: str, split: Shard) -> Shard | None:
        """Placement of a weight of so many heads that groups of ranks can have some; else None."""
        if len(sympy.divisors(self.degree)) < 3:
            return None
        number = math.gcd(self._pieces(name, split) or 1, self.degree)
        if number in (1, self.degree):
            return None
        return replace(split, copies=self.degree // number)

    def propagate(
        self, weights: Assignment, inside: frozenset[fx.Node] = frozenset()
    ) -> Propagation | None:
        """Propagation of an assignment, followed once; None if there is none."""
        key = frozenset(weights.items()), inside
        if key not in self._layouts:
            layout = None
            with suppress(ShardError):
                layout = propagate(self.graph, weights, self.degree, decide_or_gather, inside)
            self._layouts[key] = layout
        return self._layouts[key]

    def judge(self, weights: Assignment, inside: frozenset[fx.Node] = frozenset()) -> Found | None:
        """Cost of an assignment, in collectives of a full activation."""
        layout = self.propagate(weights, inside)
        try:
            needed = None if layout is None else transfers(self.graph, layout)
        except ShardError:
            needed = None
        if needed is None:
            return None
        again = {n: self._repeated(weights.get(n)) for n in self.nodes}
        whole = sum(f * again[n] for n, f in self._gemm_share.items())
        rest = sum(math.prod(self.shapes[n]) * again[n] for n in self.nodes)
        total = sum(math.prod(shape) for shape in self.shapes.values()) or 1
        value = self.gain * whole + 1e-3 * rest / total
        value += sum(map(self.price, needed))
        return Found(dict(weights), inside, tuple(needed), value)

    def _repeated(self, placed: Placement | None) -> float:
        """Fraction of a parameter's work that every rank does: 0 if shared out, 1 if whole."""
        if isinstance(placed, Shard) and placed.copies > 1:
            return (placed.copies - 1) / (self.degree - 1)
        return whole_share(placed)

    def price(self, transfer: Transfer) -> float:
        """Cost of a collective, in those of a full activation."""
        size = transfer.numel / self.scale
        if transfer.of_weights:
            return size * 0.1 + _OF_WEIGHTS
        if transfer.kind is Collective.INSIDE:
            return max(_OF_POSITIONS, size)
        return max(_OF_ONE if transfer.numel == self.tokens else 1.0, size)

    def runs(self, weights: Assignment) -> bool:
        """Whether the operators run on their shards."""
        layout = self.propagate(weights)
        try:
            assert layout is not None
            rewrite(self.graph, layout, self.degree)
        except ShardError:
            return False
        return True


def _joined(group: Assignment, best: Assignment) -> Iterator[Assignment]:
    """Both together: where they differ as the one has it, and as the other.

    A weight that was split for itself may be wanted otherwise by one in front of it.
    """
    yield {**group, **best}
    if any(best.get(name, placed) != placed for name, placed in group.items()):
        yield {**best, **group}


def whole_share(placed: Placement | None) -> float:
    """Fraction of a parameter that every rank holds."""
    if isinstance(placed, PartlySharded):
        return sum(placed.parts[i] for i in placed.whole) / sum(placed.parts)
    return 0.0 if isinstance(placed, Shard) else 1.0


def _small_parts_whole(placed: Shard, degree: int) -> PartlySharded | None:
    """Placement with the largest fused parts sharded and the others replicated."""
    largest = max(placed.parts)
    whole = frozenset(i for i, size in enumerate(placed.parts) if size < largest)
    if not whole or largest % degree:
        return None
    return PartlySharded(placed.dim, placed.parts, whole, placed.origin)
