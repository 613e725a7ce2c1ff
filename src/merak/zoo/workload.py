"""Workloads of transformers' architectures: a model by name, with its example batches."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from merak.core.tensor_meta import Signature
from merak.graph.segment.build import GraphSource
from merak.graph.weights.empty_weights import empty_weights
from merak.plan.cost.optimizer_memory import OptimizerFactory
from merak.plan.options import ParallelOptions
from merak.plan.price.workload import Workload
from merak.zoo.batches.batch import example_arguments, example_columns
from merak.zoo.batches.columns import draw_batch
from merak.zoo.model_source import ModelSource

TEXTS = ("input_ids", "decoder_input_ids")
"""Columns whose elements are the tokens of a sample."""


def example_workload(
    source: ModelSource,
    *,
    global_batch: int,
    sequence: int | None = None,
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    device: torch.device | None = None,
    cache_dir: Path | None = None,
    optimizer: OptimizerFactory | None = None,
    common: ParallelOptions | None = None,
) -> Workload:
    """Make the workload of an architecture, which trains on example batches.

    Args:
        source: the architecture.
        global_batch: samples of one step of the whole job.
        sequence: tokens of a sequence; the model's longest, up to 512, where it is None.
        dtype: type of the parameters.
        autocast: type of mixed precision; None without.
        device: type of the devices it is planned for; the CPU where it is None.
        cache_dir: where traces are stored; None for no cache.
        optimizer: makes the optimizer; None forecasts no state.
        common: the options that all of its layouts have; None for the defaults.

    Raises:
        CommandError: sizes that do not fit the model, or a model of another kind of input.
    """
    columns = partial(_typed_signature, source, sequence, dtype)
    sample = dict(columns(1))
    ids = next((sample[name] for name in TEXTS if name in sample), None)
    text = None if ids is None else ids.shape[1:]
    model = empty_model(source, dtype)
    _switch_off_cache(model)
    graph_source = GraphSource(
        model,
        fixed=example_arguments(source.model_class),
        device=torch.device("cpu") if device is None else device,
        cache_dir=cache_dir,
        autocast=autocast,
        example={
            name: value.to(dtype) if value.dtype == torch.float32 else value
            for name, value in example_batch(source, sequence).items()
        },
    )
    return Workload(
        graph_source,
        columns,
        global_batch,
        tokens_per_sample=1 if text is None else math.prod(text),
        sequence=text[-1] if text else None,
        optimizer=optimizer,
        common=common or ParallelOptions(),
    )


def _switch_off_cache(model: nn.Module) -> None:
    """Let a model make no cache of keys and values: transformers' Trainer does the same."""
    for module in model.modules():
        config: Any = vars(module).get("config")
        if getattr(config, "use_cache", False):
            config.use_cache = False


def _typed_signature(
    source: ModelSource, sequence: int | None, dtype: torch.dtype, microbatch: int
) -> Signature:
    """Columns of a batch for parameters of a type: features have it, too, as models require."""
    columns = example_signature(source, sequence, microbatch)
    return tuple(
        (name, replace(meta, dtype=dtype) if meta.dtype == torch.float32 else meta)
        for name, meta in columns
    )


def example_signature(source: ModelSource, sequence: int | None, microbatch: int) -> Signature:
    """Return the columns of an architecture's example batch.

    Args:
        source: the architecture.
        sequence: tokens of a sequence; None as of `example_columns`.
        microbatch: samples.
    """
    columns = example_columns(
        source.model_class, source.config, batch=microbatch, sequence=sequence
    )
    return tuple((name, column.meta) for name, column in columns.items())


def example_batch(
    source: ModelSource, sequence: int | None, samples: int = 2, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Draw an example batch of an architecture, the same for the same seed.

    Args:
        source: the architecture.
        sequence: tokens of a sequence; None as of `example_columns`.
        samples: of the batch.
        seed: of its values.
    """
    columns = example_columns(source.model_class, source.config, batch=samples, sequence=sequence)
    return draw_batch(columns, seed=seed)


def reads_sequence(source: ModelSource) -> bool:
    """Whether an architecture's batches have sequences, of which a user says the tokens.

    Args:
        source: the architecture.
    """
    short, long = (example_signature(source, tokens, 1) for tokens in (4, 8))
    return short != long


def empty_model(source: ModelSource, dtype: torch.dtype) -> nn.Module:
    """Build a model without weights, in a type for its parameters."""
    with empty_weights():
        built: nn.Module = source.build()
    return built.to(dtype)
