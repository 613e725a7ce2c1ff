"""Tensor parallelism of a model at its real widths: shards that its small version does not show."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from merak.graph.ir.ir import ModelGraph
from merak.graph.tensor_parallel.apply import tensor_parallel
from merak.graph.tensor_parallel.report import (
    dividing_degrees,
    report_sharding,
    sizes_of_read,
    split_share,
    undivided_sentence,
    undivided_weights,
)

SMALL_SHARE = 0.9
"""Less than this is a small share, and the largest parameters that stay whole are listed."""

_MOST_LISTED = 5


@dataclass(frozen=True, slots=True)
class RealWidths:
    """Tensor parallelism of a model with few layers of its real widths.

    Args:
        parameters: how many numbers the few layers and the rest of the model read; an encoder that
            the batch has no input for, say, is left out.
        tokens: of the sequence that it was traced for.
        tp: the tensor parallel degree.
        split: fraction of these parameters that ranks share out.
        forward: collectives of activations in the forward of the layer that has most.
        backward: those in the backward of the layer that has most.
        whole: the largest parameters that every rank holds, and why; empty where nearly all are
            split.
        undivided: sentence about weights that the degree does not divide, and degrees that would;
            None where it divides all.
    """

    parameters: int
    tokens: int
    tp: int
    split: float
    forward: int
    backward: int
    whole: Mapping[str, str] = field(default_factory=dict)
    undivided: str | None = None


def real_widths(graph: ModelGraph, tp: int, tokens: int) -> RealWidths:
    """Shard a model as a job does, and count.

    Args:
        graph: the model at its real widths, traced without weights.
        tp: the tensor parallel degree.
        tokens: of the sequence that it was traced for.

    Raises:
        MerakError: the model cannot be sharded.
    """
    sizes = sizes_of_read(graph)
    parallel = tensor_parallel(graph, None, tp)
    share = split_share(graph, parallel)
    whole: dict[str, str] = {}
    forward, backward = Counter[str](), Counter[str]()
    for segment, found in zip(graph.segments, report_sharding(graph, parallel), strict=True):
        layer = layer_of(segment.name)
        forward[layer] += found.forward
        backward[layer] += found.backward
        whole |= found.whole
    weights = undivided_weights(graph, parallel)
    advice = dividing_degrees(graph, parallel)
    largest = sorted(whole, key=lambda name: -sizes[name])[:_MOST_LISTED]
    return RealWidths(
        sum(sizes.values()),
        tokens,
        tp,
        share,
        max(forward.values(), default=0),
        max(backward.values(), default=0),
        {name: whole[name] for name in largest} if share < SMALL_SHARE else {},
        None if weights is None else undivided_sentence([tp], weights, advice),
    )


def layer_of(segment: str) -> str:
    """The part of a segment's name up to its layer's number, such as "model.layers.3"."""
    found = re.match(r".*?\.\d+", segment)
    return found[0] if found else segment
