"""Everyday PyTorch models train and evaluate on ranks as in one process: gradients and buffers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from merak.check import CheckOptions, CheckReport, Job, Layout, Workspace, check_against
from merak.check.reference import reference
from tests.multirank.ranks import RankPool
from tests.tiers import slow
from tests.zoo.plain.models import BY_NAME, MODELS, case_of


def check(
    pool: RankPool, model: type[nn.Module], job: tuple[Layout, str], folder: Path
) -> CheckReport:
    layout, schedule = job

    def launch(function: Callable[..., Any], arguments: tuple[Any, ...], num_ranks: int) -> Any:
        return pool.run(function, num_ranks, *arguments)

    options = CheckOptions(
        schedule, num_microbatches=3, microbatch=4, steps=2, evaluate=layout.tp > 1
    )
    checked = Job(case_of(model), layout, options)
    report = check_against(reference(checked), checked, Workspace(folder, launch))
    assert report.reason is None
    assert report.segments > 1
    return report


ESSENTIAL = (
    "LSTM", "NanoGPT", "Shared", "Experts", "InPlace", "Spectral", "VectorQuantized",
)  # fmt: skip
"""Those that `make test` trains; `make test-all` trains all."""


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_as_a_pipeline(pool: RankPool, model: type[nn.Module], tmp_path: Path) -> None:
    report = check(pool, model, (Layout(pp=2), "1f1b"), tmp_path)
    assert report.tolerance == 1e-5


# torch warns of its own reentrant checkpoints where no gradient is asked for.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize(
    "model",
    [model if model.__name__ in ESSENTIAL else slow(model) for model in MODELS],
    ids=lambda model: model.__name__,
)
def test_split_and_as_a_pipeline(pool: RankPool, model: type[nn.Module], tmp_path: Path) -> None:
    report = check(pool, model, (Layout(tp=2, pp=2), "1f1b"), tmp_path)
    assert report.evaluation_max_rel_diff is not None


@pytest.mark.parametrize("name", ["ResNet", slow("Contrastive"), slow("UNet")])
def test_recomputed(pool: RankPool, name: str, tmp_path: Path) -> None:
    check(pool, BY_NAME[name], (Layout(pp=2), "early_recompute"), tmp_path)
