"""Tensor parallelism of models by name at their real widths, without weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain, islice

import torch

from merak.check import CheckOptions, Layout
from merak.check.real_widths import RealWidths, real_widths
from merak.core.errors import MerakError
from merak.graph.segment.build import GraphSource, build_graph
from merak.zoo.batches.batch import DEFAULT_SEQUENCE, example_arguments
from merak.zoo.batches.examples import Example, examples
from merak.zoo.configs.fields import Fields, merged, most_positions
from merak.zoo.configs.shrink import Wanted, few_layers
from merak.zoo.model_source import ModelSource
from merak.zoo.request import Request, completions_of
from merak.zoo.workload import TEXTS, empty_model

REAL_SEQUENCE = 1024
"""Tokens of a sequence at real widths, where the model takes so many."""

MOST_SEQUENCE = 4096
"""Tokens of a sequence, of a model that takes no other number."""

_BATCHES = ((1, 1), (24, 1), (24, CheckOptions().microbatch))
"""How many kinds of batches of one config are tried, and their samples: one plain sample, then
further kinds, then several samples, as for a model that takes several rows as one."""


def sharded_at_real_widths(request: Request, layout: Layout, filled: Fields) -> RealWidths:
    """Shard a few layers of a model's real widths, without weights.

    Args:
        request: the model.
        layout: the degrees.
        filled: fields that its config leaves open.

    Raises:
        MerakError: it cannot be traced or sharded.
    """
    first: MerakError | None = None
    for most, samples in _BATCHES:  # the next only where no config takes one of these
        for source, tokens in _at_real_widths(request, filled):
            failures: list[MerakError] = []
            batches = examples(source.model_class, source.config, tokens, failures)
            for example in islice(batches, most):
                try:
                    return _sharded(source, layout.tp, example, samples)
                except MerakError as failed:  # perhaps for want of a layer of each kind
                    failures.append(failed)
            first = first or failures[0]
    assert first is not None, "no config"
    raise first


def _at_real_widths(request: Request, filled: Fields) -> Iterator[tuple[ModelSource, int]]:
    """Yield versions of few layers with the model's own widths, each with tokens of a sample."""
    for completion in chain((filled,), completions_of(request, Wanted())):
        config = request.source(completion).config
        for fields in few_layers(config, request.given):
            source = request.source(merged(completion, fields))
            yield from ((source, tokens) for tokens in _sequences(source))


def _sequences(source: ModelSource) -> tuple[int, ...]:
    """Tokens of a sample, with a number to try where the model does not take the first.

    Some count a position for the first token that they predict, and have no more than that; others
    train on as many tokens as they have positions.
    """
    limit = most_positions(source.config)
    if limit is None:
        return (DEFAULT_SEQUENCE,)
    if limit[1] > REAL_SEQUENCE:
        return (REAL_SEQUENCE, limit[1]) if limit[1] <= MOST_SEQUENCE else (REAL_SEQUENCE,)
    return (limit[1], limit[1] // 2)


def _sharded(source: ModelSource, tp: int, example: Example, samples: int) -> RealWidths:
    graph_source = GraphSource(
        empty_model(source, torch.float32),
        example.loss_fn,
        example.loss_columns,
        fixed=example_arguments(source.model_class),
    )
    metas = {name: column.of(samples).meta for name, column in example.columns.items()}
    graph = build_graph(graph_source, metas, training=True)
    ids = next((metas[name] for name in TEXTS if name in metas), None)
    return real_widths(graph, tp, 1 if ids is None else math.prod(ids.shape[1:]))
