"""Tensor parallelism as a rewriting of the traced graph: every rank runs its share of a segment.

Three steps: attributes of a feature dict become splits of weights (`place_weights`), these are
carried through the graph operator by operator (`propagate`), and the graph is written anew with
local sizes and the collectives in between (`rewrite`). What crosses from one segment to the next is
whole on every rank.

Source: Megatron-LM (arXiv 1909.08053, section 3); Merak (IEEE TPDS), section 4.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from merak.core.errors import ShardError
from merak.core.shards import ParameterShard
from merak.graph.features import (
    Attribute,
    Column,
    Features,
    Row,
    default_features,
    resolve_features,
)
from merak.graph.ir import ModelGraph, Segment, TensorMeta
from merak.graph.sharding_placement import Sharded
from merak.graph.sharding_propagate import capacities, place_weights, propagate
from merak.graph.sharding_rewrite import rewrite


def attributes_for(model: ModelGraph, features: Features | None = None) -> dict[str, Attribute]:
    """The attribute of every parameter of a model that a feature dict speaks of.

    Args:
        model: the traced model.
        features: the user's feature dict; the one that fits the model's names if None.

    Returns:
        Attributes by parameter name.

    Raises:
        ShardError: no known dict fits the model, or a pattern matches nothing.
    """
    names = (*model.parameters, *model.tied)
    chosen = default_features(names) if features is None else features
    return resolve_features(chosen, model.parameters, model.tied)


def shard_segment(
    segment: Segment,
    parameters: Mapping[str, TensorMeta],
    attributes: Mapping[str, Attribute],
    degree: int,
) -> tuple[Segment, dict[str, ParameterShard]]:
    """Rewrite one segment for a tensor parallel degree.

    Args:
        segment: the segment; left as it is.
        parameters: what every parameter is, by name, in the whole model.
        attributes: from `attributes_for`.
        degree: the number of tensor parallel ranks.

    Returns:
        The segment that every rank runs, with the same parameters, inputs and outputs by name; and
        the layout of the parameters that are split.

    Raises:
        ShardError: sizes that the degree does not divide, or an operator that cannot be split so.
    """
    if degree == 1:
        return segment, {}
    weights = place_weights(segment, parameters, attributes)
    try:
        propagation = propagate(segment.graph, _divisible(weights, degree), degree)
    except ShardError:
        check_degree([segment], parameters, attributes, degree)
        raise
    graph = rewrite(segment.graph, propagation, degree)
    shards = {name: ParameterShard(p.dim, p.parts, degree) for name, p in weights.items()}
    return replace(segment, graph=graph), shards


def shard_model(
    model: ModelGraph, attributes: Mapping[str, Attribute], degree: int
) -> tuple[ModelGraph, dict[str, ParameterShard]]:
    """Rewrite all segments of a model for a tensor parallel degree.

    Args:
        model: the traced model; left as it is. Its `parameters` stay those of the whole.
        attributes: from `attributes_for`.
        degree: the number of tensor parallel ranks.

    Returns:
        The model that every rank runs, and the layout of the parameters that are split.

    Raises:
        ShardError: as `shard_segment`; degrees that fit are those that fit every segment.
    """
    try:
        pairs = [shard_segment(s, model.parameters, attributes, degree) for s in model.segments]
    except ShardError:
        check_degree(model.segments, model.parameters, attributes, degree)
        raise
    shards = {name: shard for _, found in pairs for name, shard in found.items()}
    _check_shared(model.segments, shards, [found for _, found in pairs])
    return replace(model, segments=tuple(segment for segment, _ in pairs)), shards


def check_degree(
    segments: Iterable[Segment],
    parameters: Mapping[str, TensorMeta],
    attributes: Mapping[str, Attribute],
    degree: int,
) -> None:
    """Check that a degree divides the heads, kv-heads, feed-forward units … of all split layers.

    Args:
        segments: the segments to check.
        parameters: what every parameter is, by name.
        attributes: from `attributes_for`.
        degree: the number of tensor parallel ranks.

    Raises:
        ShardError: it does not; the sentence names the first layer, its size, and the degrees that
            fit all the segments. Or the layers cannot be split so under any degree.
    """
    found: dict[str, int] = {}
    for segment in segments:
        weights = place_weights(segment, parameters, attributes)
        found |= capacities(propagate(segment.graph, weights, 1))
    for name, capacity in found.items():
        if capacity % degree:
            attribute = attributes[name]
            assert isinstance(attribute, (Column, Row))
            raise ShardError(
                f"tp={degree} does not divide the {capacity} {attribute.size} of "
                f"{name.rpartition('.')[0] or name}; the degrees that fit this model are "
                f"{_listed(_divisors(math.gcd(*found.values())))}."
            )


def _divisible(weights: Mapping[str, Sharded], degree: int) -> Mapping[str, Sharded]:
    for name, placed in weights.items():
        if any(size % degree for size in placed.parts):
            raise ShardError(
                f"{name} has parts of {placed.parts}, which tp={degree} does not divide."
            )
    return weights


def _check_shared(
    segments: Sequence[Segment],
    shards: Mapping[str, ParameterShard],
    found: Sequence[Mapping[str, ParameterShard]],
) -> None:
    """A parameter that several segments read lies the same in all of them."""
    for segment, own in zip(segments, found, strict=True):
        for name in segment.parameters:
            if shards.get(name) != own.get(name):
                raise ShardError(
                    f"{name} is shared by several layers, which use it in different ways; give it "
                    "Replicate() in the feature dict."
                )


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _listed(numbers: Sequence[int]) -> str:
    *head, last = (str(n) for n in numbers)
    return f"{', '.join(head)} and {last}" if head else last
