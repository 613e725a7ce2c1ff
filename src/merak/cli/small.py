"""Small versions of models by name, for `merak check`."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedConfig

from merak.check import Case, CheckOptions, CheckReport, Job, Layout, Workshop, check_against
from merak.check.shrink import IMAGE, Wanted, attempts
from merak.check.small import Trained, first_that_trains
from merak.cli.batch import Column, draw_batch, example_arguments, example_columns
from merak.cli.errors import CommandError
from merak.cli.launch import Work, run_ranks, under_torchrun
from merak.cli.model import ModelSource, resolve_model
from merak.core.random import seed_for

DEFAULT_SEQUENCE = 32
"""Tokens of a sequence, where the model takes so many."""


@dataclass(frozen=True, slots=True)
class Request:
    """A model by name, as the user asks for it.

    Args:
        model: as `--model`.
        given: fields of its config that the user has set.
        sequence: tokens of a sequence; None takes a short one.
        trust_remote_code: whether code in the model's folder may run.
    """

    model: str
    given: Mapping[str, Any] = field(default_factory=dict)
    sequence: int | None = None
    trust_remote_code: bool = False

    def source(self, changes: Mapping[str, Any]) -> ModelSource:
        """The model's class and config, with further changes of fields the user has not set."""
        fields = merged(changes, self.given)
        source = resolve_model(self.model, fields, trust_remote_code=self.trust_remote_code)
        _pad(source.config)
        return source


def check_named(request: Request, layout: Layout, options: CheckOptions) -> CheckReport:
    """Check a model by name, in the smallest version that trains in one process.

    Args:
        request: the model.
        layout: the degrees.
        options: how to train.

    Raises:
        CommandError: there is no such model, or counts that make no sense.
        EagerError: plain PyTorch cannot train it either.
        MerakError: the degrees or the schedule do not fit.
    """
    started = time.perf_counter()
    _refuse_counts(layout, options)
    trained = small_version(request, layout, options)
    with _folder() as folder:
        report = check_against(trained.outcome, trained.job, Workshop(folder, _launch))
    return replace(report, seconds=time.perf_counter() - started)


def small_version(request: Request, layout: Layout, options: CheckOptions) -> Trained:
    """The smallest version of a model that trains in one process, and what it does there.

    Raises:
        CommandError: there is no such model.
        EagerError: no version of it trains.
    """
    # A stage of its own for every rank, even if its schedule gives it two.
    wanted = Wanted(layers=max(2, layout.pp), heads_divisor=layout.tp)
    versions = attempts(request.source({}).config, request.given, wanted)
    return first_that_trains(partial(_job, request, v, layout, options) for v in versions)


def _pad(config: PreTrainedConfig) -> None:
    """Name a padding token where there is none, which decoders that classify texts look for."""
    text = config.get_text_config()
    if getattr(text, "vocab_size", None) and getattr(text, "pad_token_id", None) is None:
        text.pad_token_id = 0


def merged(changes: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a config from two sources, configs inside it included; the second one wins."""
    fields = dict(changes)
    for name, value in given.items():
        old = fields.get(name)
        both = isinstance(value, Mapping) and isinstance(old, Mapping)
        fields[name] = merged(old, value) if both else value  # type: ignore[arg-type]
    return fields


def _job(
    request: Request, changes: Mapping[str, Any], layout: Layout, options: CheckOptions
) -> Job:
    source = request.source(changes)
    limit = getattr(source.config.get_text_config(), "max_position_embeddings", None)
    longest = limit if isinstance(limit, int) and limit > 0 else DEFAULT_SEQUENCE
    asked = request.sequence or min(DEFAULT_SEQUENCE, longest)
    columns = example_columns(source.model_class, source.config, batch=1, sequence=asked)
    if changes:
        columns = {name: _small_image(source, name, c) for name, c in columns.items()}
    # A config does not travel: its class may come from the model's own folder.
    case = Case(
        source.name,
        partial(_build, request, changes),
        partial(_draw, columns),
        fixed=example_arguments(source.model_class),
    )
    return Job(case, layout, options)


def _small_image(source: ModelSource, name: str, column: Column) -> Column:
    """Smaller images for models whose config leaves their size open."""
    owners = (source.config, getattr(source.config, "vision_config", None))
    if name != "pixel_values" or any(getattr(o, "image_size", None) for o in owners):
        return column
    return replace(column, shape=(*column.shape[:2], IMAGE, IMAGE))


def _build(request: Request, changes: Mapping[str, Any]) -> nn.Module:
    return request.source(changes).build()


def _draw(columns: Mapping[str, Column], step: int, samples: int) -> dict[str, torch.Tensor]:
    whole = {n: replace(c, shape=(samples, *c.shape[1:])) for n, c in columns.items()}
    return draw_batch(whole, seed=seed_for("check", step))


def _refuse_counts(layout: Layout, options: CheckOptions) -> None:
    counts = {
        "--dp": layout.dp, "--tp": layout.tp, "--pp": layout.pp, "--steps": options.steps,
        "--microbatches": options.num_microbatches, "--batch": options.microbatch,
    }  # fmt: skip
    for name, number in counts.items():
        if number < 1:
            raise CommandError(f"{name} {number} is too few; use 1 or more.")


@contextmanager
def _folder() -> Iterator[Path]:
    """A folder of this check alone; the same on all ranks that torchrun has started."""
    if not under_torchrun():
        with tempfile.TemporaryDirectory(prefix="merak-check-") as name:
            yield Path(name)
        return
    job = f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}-{os.environ.get('MASTER_PORT', '')}"
    folder = Path(tempfile.gettempdir()) / f"merak-check-{os.getuid()}-{job}"
    folder.mkdir(mode=0o700, exist_ok=True)
    yield folder


def _launch(function: Callable[..., Any], arguments: tuple[Any, ...], num_ranks: int) -> None:
    if not under_torchrun():
        run_ranks(Work(function, arguments), num_ranks)
        return
    function(*arguments)
    if dist.is_initialized():
        dist.barrier()
