"""Report of tensor parallelism: what it shards of a model, and why not the rest."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import sympy  # type: ignore[import-untyped]

from merak.core.shards import shard_size
from merak.graph.ir.ir import ModelGraph, Segment
from merak.graph.ir.operators import family, weights_only
from merak.graph.tensor_parallel.apply import TensorParallel
from merak.graph.tensor_parallel.placement import REPLICATE, PartlySharded, Replicate, Shard
from merak.graph.tensor_parallel.propagate import weight_dims
from merak.graph.tensor_parallel.search.auto_shard import WeightPlacement, limits_of
from merak.graph.tensor_parallel.search.cost import (
    FORWARD,
    Transfer,
    has_gradient,
    parameter_nodes,
)
from merak.graph.tensor_parallel.search.experts import experts_of
from merak.graph.tensor_parallel.search.search import whole_share
from merak.graph.tensor_parallel.search.vocabularies import vocabularies
from merak.graph.tensor_parallel.sequence.propagate import SequencePropagation
from merak.graph.trace.opaque.report import opaque_cause


@dataclass(frozen=True, slots=True)
class SegmentReport:
    """Sharding of one segment's weights, and its collectives.

    Args:
        split: the placement of each split parameter, by name: "column", "row (64, 64)", "experts",
            "vocabulary", ….
        whole: why each other parameter is whole, by name.
        forward: collectives of activations in its forward.
        backward: those in its backward.
        sharded: values of activations, of those outside split work, that are sharded over the
            sequence.
        values: how many there are outside split work.
        gathered: operators outside split work that take whole what is sharded.
    """

    split: dict[str, str] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    forward: int = 0
    backward: int = 0
    sharded: int = 0
    values: int = 0
    gathered: tuple[str, ...] = ()


def report_sharding(model: ModelGraph, parallel: TensorParallel) -> tuple[SegmentReport, ...]:
    """Sharding reports of a model's segments."""
    reasons, tables = replication_reasons(model, parallel), vocabularies(model)
    model, parallel = parallel.fit(model)
    return tuple(_report(segment, parallel, reasons, tables) for segment in model.segments)


def split_share(model: ModelGraph, parallel: TensorParallel) -> float:
    """Fraction of the parameters that a model reads, by numbers, that the ranks share out."""
    sizes = sizes_of_read(model)
    split = sum(sizes[n] * (1 - whole_share(p)) for n, p in parallel.weights.items())
    return split / max(1, sum(sizes.values()))


def sizes_of_read(model: ModelGraph) -> dict[str, int]:
    """Numbers in every parameter that a model reads, by name.

    Others, as of cross-attention in a decoder that is given no encoder's output, have no gradient
    and do no work.
    """
    read = {name for segment in model.segments for name in segment.parameters}
    return {n: math.prod(meta.shape) for n, meta in model.parameters.items() if n in read}


def replication_reasons(model: ModelGraph, parallel: TensorParallel) -> dict[str, str]:
    """Reasons why parameters are replicated, by name."""
    degree, pieces = parallel.auto_sharder.degree, limits_of(model)
    found = dict.fromkeys(vocabularies(model), "splitting its vocabulary costs more than it saves")
    for name in model.parameters:
        count = pieces.get(name)
        if name in found or name in parallel.weights:
            continue
        if count is None:
            found[name] = "it works on whole values"
        elif count % degree:
            found[name] = f"its outputs are {count} pieces, which tp={degree} does not divide"
        else:
            found[name] = "splitting it costs more than it saves"
    return {name: why for name, why in found.items() if name not in parallel.weights}


def replication_warning(model: ModelGraph, parallel: TensorParallel) -> str | None:
    """Warning about weights that the degree leaves replicated; None if they are few."""
    degree = parallel.auto_sharder.degree
    if not parallel.weights.keys() - vocabularies(model):
        but, rest = (" but the vocabulary", "the rest") if parallel.weights else ("", "all")
        why = opaque_cause(model) or "any other split would gather more than it saves"
        return (
            f"tp={degree} splits nothing{but} of this model, so that every rank trains {rest} of "
            f"it: {why}; `merak trace --tp` lists why, and dp or pp would use the ranks."
        )
    sizes = {name: math.prod(meta.shape) for name, meta in model.parameters.items()}
    pieces = limits_of(model)
    whole = [n for n, count in pieces.items() if count % degree and n not in parallel.weights]
    left, split = sum(sizes[n] for n in whole), sum(sizes[n] for n in parallel.weights)
    if left <= 0.05 * (left + split):
        return None
    name = max(whole, key=lambda n: sizes[n])
    return (
        f"tp={degree} leaves {left / (left + split):.0%} of what could be split whole on every "
        f"rank: the outputs of {name}, for one, are {pieces[name]} pieces, which it does not "
        f"divide; {dividing_degrees(model, parallel)}, and `merak trace --tp` lists all."
    )


def dividing_degrees(model: ModelGraph, parallel: TensorParallel) -> str:
    """Advice which degrees would divide the outputs of all weights, where this one does not.

    Args:
        model: that is sharded.
        parallel: how.

    Returns:
        Such as "tp=4 or tp=12 would divide all": the nearest smaller degree and the nearest larger
        one, as far as there are any.
    """
    degree = parallel.auto_sharder.degree
    pieces = {name: count for name, count in limits_of(model).items() if count > 1}
    repeated = {n for n, p in parallel.weights.items() if isinstance(p, Shard) and p.copies > 1}
    few = {count for name, count in pieces.items() if name in repeated}
    common = math.gcd(*(count for name, count in pieces.items() if name not in repeated))
    fitting = [d for d in sympy.divisors(common) if all(d % n == 0 or n % d == 0 for n in few)]
    nearest = [d for d in fitting if 1 < d < degree][-1:] + [d for d in fitting if d > degree][:1]
    if not nearest:
        return "no tp above 1 would divide all"
    return f"{' or '.join(f'tp={d}' for d in nearest)} would divide all"


def undivided_weights(model: ModelGraph, parallel: TensorParallel) -> str | None:
    """Weights whose outputs the degree does not divide, and what the ranks do instead.

    Args:
        model: that is sharded.
        parallel: how.

    Returns:
        Such as "the outputs of q_proj.weight and k_proj.weight (12 pieces): groups of 2 ranks hold
        and compute the same ones"; None where all are divided.
    """
    degree, groups = parallel.auto_sharder.degree, dict[tuple[int, int], dict[str, None]]()
    for name, count in limits_of(model).items():
        placed = parallel.weights.get(name)
        copies = degree if placed is None else placed.copies if isinstance(placed, Shard) else 1
        if count % degree and copies > 1 and (copies == degree or degree % count):
            short = ".".join(name.split(".")[-2:])
            groups.setdefault((count, copies), {})[short] = None
    found = []
    for (count, copies), names in groups.items():
        who = f"groups of {copies} ranks hold and compute the same ones"
        if copies == degree:
            who = "every rank holds and computes them whole"
        found.append(f"the outputs of {_listed(tuple(names))} ({count} pieces): {who}")
    return ", nor ".join(found) or None


def undivided_sentence(degrees: Sequence[int], weights: str, advice: str) -> str:
    """Sentence about degrees that do not divide all weights, and those that would.

    Args:
        degrees: that do not divide them.
        weights: from `undivided_weights`.
        advice: from `dividing_degrees`.
    """
    listed = _listed([str(degree) for degree in degrees])
    return f"tp={listed} {'do' if len(degrees) > 1 else 'does'} not divide {weights}; {advice}"


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def _report(
    segment: Segment,
    parallel: TensorParallel,
    reasons: Mapping[str, str],
    tables: Collection[str],
) -> SegmentReport:
    found = parallel.split(segment)
    nodes = parameter_nodes(segment.graph)
    experts, degree = experts_of(segment), parallel.auto_sharder.degree
    split = {
        name: "experts"
        if name in experts and experts[name].placed(name, degree) == found.weights[name]
        else _of_vocabulary(found.weights[name], degree)
        if name in tables and len(found.weights[name].parts) == 1
        else describe(found.weights[name], [out for out, _ in weight_dims(node)])
        for name, node in nodes.items()
        if name in found.weights
    }
    whole = {name: reasons[name] for name in nodes if name not in split}
    if parallel.sequence_plan is None:
        return SegmentReport(split, whole, *_counted(found.transfers))
    shards = parallel.sequence_plan.segments[segment.index]
    counts = (*_counted(shards.transfers), *_on_shards(segment, shards.propagated))
    return SegmentReport(split, whole, *counts, gathered_for(segment, shards.propagated))


def _counted(transfers: Sequence[Transfer]) -> tuple[int, int]:
    """Collectives of activations in the forward, and in the backward."""
    sent = [transfer.kind in FORWARD for transfer in transfers if not transfer.of_weights]
    return sent.count(True), sent.count(False)


def _on_shards(segment: Segment, propagated: SequencePropagation) -> tuple[int, int]:
    """Number of values outside sharded work that are sharded, and of all of them."""
    weights = weights_only(segment.graph)
    found = [
        node in propagated.sharded or node in propagated.propagation.outputs
        for node, placed in propagated.propagation.placements.items()
        if node.op == "call_function" and node not in weights and has_gradient(node)
        if node in propagated.sharded or isinstance(placed, Replicate)
    ]
    return found.count(True), len(found)


def gathered_for(segment: Segment, propagated: SequencePropagation) -> tuple[str, ...]:
    """Operators outside sharded work for which shards are gathered, and where they are."""
    found = (
        f"{family(node.target)} in {node.meta.get('module') or segment.name}"
        for node, decision in propagated.propagation.decisions.items()
        if decision.output == REPLICATE
        if any(
            need == REPLICATE and isinstance(propagated.propagation.placements[n], Shard)
            for n, need in decision.needs.items()
        )
    )
    return tuple(dict.fromkeys(found))


def _of_vocabulary(placed: WeightPlacement, degree: int) -> str:
    """Sharded vocabulary in words, with its rows of padding."""
    (size,) = placed.parts
    padding = shard_size(size, degree) * degree - size
    return f"vocabulary ({size} and {padding} of padding)" if padding else "vocabulary"


def describe(placed: WeightPlacement, outputs: Sequence[int]) -> str:
    """Attribute in words: "column", "row", with the sizes of fused parts.

    Args:
        placed: the placement of the parameter.
        outputs: its output dims in matrix products; none for other parameters, which are split
            along with some outputs.
    """
    words = "row" if outputs and placed.dim not in outputs else "column"
    if isinstance(placed, Shard) and placed.copies > 1:
        return f"{words}, each head on {placed.copies} ranks"
    if len(placed.parts) == 1:
        return words
    whole = placed.whole if isinstance(placed, PartlySharded) else frozenset[int]()
    sizes = (f"{size} whole" if i in whole else str(size) for i, size in enumerate(placed.parts))
    return f"{words} ({', '.join(sizes)})"
