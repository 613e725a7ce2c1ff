"""Checks of models by name, in small versions, for `merak check`."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn

from merak.check import Case, CheckOptions, CheckReport, Job, Layout, Workspace, check_against
from merak.core.errors import CommandError, MerakError
from merak.core.files.private_files import ForeignFile, own_folder
from merak.core.random import seed_for
from merak.launch.devices import check_backend, device_of
from merak.launch.ranks import Work, run_ranks, under_torchrun
from merak.zoo.batches.batch import example_arguments, predicts_text_of_images
from merak.zoo.batches.columns import Column, draw_batch
from merak.zoo.batches.examples import Example, examples, image_examples
from merak.zoo.configs.field_names import IMAGE
from merak.zoo.configs.fields import flat, merged, most_positions
from merak.zoo.configs.shrink import Attempt, Wanted, attempts, few_layers
from merak.zoo.model_source import ModelSource
from merak.zoo.request import Request, completions_of, padding
from merak.zoo.smallest import Trained, Version, first_that_trains
from merak.zoo.widths_by_name import sharded_at_real_widths

MOST_WITH_IMAGES = 10
"""Versions of a model that are tried on texts with images, before texts alone are."""

DEFAULT_SEQUENCE = 32
"""Tokens of a sequence, where the model takes so many."""


def check_named(request: Request, layout: Layout, options: CheckOptions) -> CheckReport:
    """Check a model by name, in the smallest version that trains in one process.

    With `real_widths` it is one of few layers; where the memory is too small to train that, the
    smallest version is trained, and the real widths are sharded without weights.

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
    check_backend(options.backend, device_of(options.device))
    if request.sequence is not None and request.sequence < 1:
        raise CommandError(f"--seq {request.sequence} has no tokens; use 1 or more.")
    trained = small_version(request, layout, options)
    widths = (
        sharded_at_real_widths(request, layout, trained.filled) if request.real_widths else None
    )
    with _folder() as folder:
        report = check_against(trained.outcome, trained.job, Workspace(folder, _launch))
    seconds = time.perf_counter() - started
    case = trained.job.case
    return replace(
        report,
        seconds=seconds,
        filled=flat(trained.filled),
        columns=tuple(case.batch(0, 1)),
        loss=getattr(case.loss_fn, "__name__", None),
        real_widths=widths,
    )


def small_version(request: Request, layout: Layout, options: CheckOptions) -> Trained:
    """Return the smallest version of a model that trains in one process, and its outcome there.

    Raises:
        CommandError: there is no such model.
        EagerError: no version of it trains.
    """
    return first_that_trains(_versions(request, layout, options))


def _versions(request: Request, layout: Layout, options: CheckOptions) -> Iterator[Version]:
    """Yield versions of a model: as its config is, then with default values for open fields."""
    # A stage of its own for every rank, even if its schedule gives it two.
    wanted = Wanted(layers=max(2, layout.pp), heads_divisor=layout.tp * layout.cp)
    if request.real_widths:
        yield _wide(request, wanted, (layout, options))
    pad = padding(request)
    if predicts_text_of_images(request.source({}).model_class):
        for one in islice(_changes(request, wanted), MOST_WITH_IMAGES):
            jobs = partial(_jobs, request, one.fields, (layout, options), None, image_examples)
            yield Version(jobs, one.is_small, filled=merged(pad, one.filled))
    for one in _changes(request, wanted):
        most = None if one.has_small_inputs else 1
        jobs = partial(_jobs, request, one.fields, (layout, options), most, examples)
        yield Version(jobs, one.is_small, not one.fields, merged(pad, one.filled))


def _wide(request: Request, wanted: Wanted, how: tuple[Layout, CheckOptions]) -> Version:
    """The version of few layers and the model's own widths, where there is memory to train it."""
    fields = next(few_layers(request.source({}).config, request.given, wanted))
    jobs = partial(_jobs, request, fields, how, 1, examples)
    # In one process and on all ranks: parameters, gradients and momenta; and what is compared.
    copies = 8 + 6 * how[0].dp * how[0].cp
    most = psutil.virtual_memory().total // 2 // (4 * copies)
    return Version(jobs, filled=padding(request), most_parameters=most)


def _changes(request: Request, wanted: Wanted) -> Iterator[Attempt]:
    """Yield changes of the config, the most wanted first."""
    config = request.source({}).config
    plain = list(attempts(config, request.given, wanted))
    likely = plain[:2]
    yield from likely  # nearly always enough; the rest takes builds to find
    found = [(place, 0, one) for place, one in enumerate(plain)]
    for number, completion in enumerate(completions_of(request, wanted), 1):
        filled = request.source(completion).config
        for place, one in enumerate(attempts(filled, request.given, wanted)):
            if one.is_small:
                both = merged(completion, one.fields)
                found.append((number + place, number, replace(one, fields=both, filled=completion)))
    yield from (one for _, _, one in sorted(found, key=lambda row: row[:2])[len(likely) :])


def _jobs(
    request: Request,
    changes: Mapping[str, Any],
    how: tuple[Layout, CheckOptions],
    most: int | None,
    kinds: Callable[..., Iterator[Example]],
    failures: Sequence[MerakError],
) -> Iterator[Job]:
    """Yield jobs for a version: the same model, on batches of several kinds."""
    source = request.source(changes)
    limit = most_positions(source.config)
    longest = DEFAULT_SEQUENCE if limit is None else min(DEFAULT_SEQUENCE, limit[1])
    requested = request.sequence or longest
    given = (source.model_class, source.config, requested, failures)
    for example in islice(kinds(*given), most):
        columns = example.columns
        if changes:
            columns = _small_images(source, columns)
        # A config does not travel: its class may come from the model's own folder.
        case = Case(
            source.name,
            partial(_build, request, changes),
            partial(_draw, columns),
            example.loss_fn,
            example.loss_columns,
            fixed=example_arguments(source.model_class),
        )
        yield Job(case, *how)


def _small_images(source: ModelSource, columns: Mapping[str, Column]) -> dict[str, Column]:
    """Return smaller images and their patches, if the config leaves their size open."""
    owners = (source.config, getattr(source.config, "vision_config", None))
    image = columns.get("pixel_values")
    is_image = image is not None and len(image.shape) == 4
    if image is None or not is_image or any(getattr(o, "image_size", None) for o in owners):
        return dict(columns)
    return {
        name: replace(c, shape=(*c.shape[:-2], IMAGE, IMAGE)) if _has_pixels(c, image) else c
        for name, c in columns.items()
    }


def _has_pixels(column: Column, image: Column) -> bool:
    return len(column.shape) > 2 and column.shape[-2:] == image.shape[-2:]


def _build(request: Request, changes: Mapping[str, Any]) -> nn.Module:
    return request.source(changes).build()


def _draw(columns: Mapping[str, Column], step: int, samples: int) -> dict[str, torch.Tensor]:
    whole = {name: column.of(samples) for name, column in columns.items()}
    return draw_batch(whole, seed=seed_for("check", step))


def _refuse_counts(layout: Layout, options: CheckOptions) -> None:
    counts = {
        "--dp": layout.dp, "--tp": layout.tp, "--pp": layout.pp, "--cp": layout.cp,
        "--steps": options.steps, "--microbatches": options.num_microbatches,
        "--batch": options.microbatch,
    }  # fmt: skip
    for name, number in counts.items():
        if number < 1:
            raise CommandError(f"{name} {number} is too few; use 1 or more.")


@contextmanager
def _folder() -> Iterator[Path]:
    """Make a folder of this check alone; the same on all ranks that torchrun has started."""
    if not under_torchrun():
        with tempfile.TemporaryDirectory(prefix="merak-check-") as name:
            yield Path(name)
        return
    job = f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}-{os.environ.get('MASTER_PORT', '')}"
    folder = Path(tempfile.gettempdir()) / f"merak-check-{os.getuid()}-{job}"
    try:
        yield own_folder(folder)
    except ForeignFile as error:
        raise CommandError(
            f"{error}, so another user could plant files for this check; remove it, or name "
            "another folder with TMPDIR."
        ) from error


def _launch(function: Callable[..., Any], arguments: tuple[Any, ...], num_ranks: int) -> None:
    if not under_torchrun():
        run_ranks(Work(function, arguments), num_ranks)
        return
    function(*arguments)
    if dist.is_initialized():
        dist.barrier()
