"""Everyday PyTorch models train on ranks as in one process: every gradient, every buffer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from merak.check import Case, CheckOptions, Job, Layout, Workshop, check_against
from merak.check.reference import reference
from tests.multirank.plain_models import LOSSES, MODELS
from tests.multirank.ranks import RankPool


def draw(model: type[nn.Module], step: int, samples: int) -> dict[str, torch.Tensor]:
    return MODELS[model](samples, torch.Generator().manual_seed(step))


def check(pool: RankPool, model: type[nn.Module], job: tuple[Layout, str], folder: Path) -> None:
    layout, schedule = job

    def launch(function: Callable[..., Any], arguments: tuple[Any, ...], num_ranks: int) -> Any:
        return pool.run(function, num_ranks, *arguments)

    case = Case(model.__name__, model, partial(draw, model), LOSSES.get(model))
    options = CheckOptions(schedule, num_microbatches=3, microbatch=4, steps=2)
    checked = Job(case, layout, options)
    report = check_against(reference(checked), checked, Workshop(folder, launch))
    assert report.reason is None
    assert report.tolerance == 1e-5
    assert report.segments > 1


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_as_a_pipeline(pool: RankPool, model: type[nn.Module], tmp_path: Path) -> None:
    check(pool, model, (Layout(pp=2), "1f1b"), tmp_path)


RECOMPUTING = [model for model in MODELS if model.__name__ in ("ResNet", "Contrastive", "UNet")]


@pytest.mark.parametrize("model", RECOMPUTING, ids=lambda model: model.__name__)
def test_recomputed(pool: RankPool, model: type[nn.Module], tmp_path: Path) -> None:
    check(pool, model, (Layout(pp=2), "early_recompute"), tmp_path)
