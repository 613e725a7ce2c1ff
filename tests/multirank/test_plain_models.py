"""Everyday PyTorch models train and evaluate on ranks as in one process: gradients and buffers."""

from __future__ import annotations

import pytest
from torch import nn

from merak.check import CheckOptions, CheckReport, Job, Layout
from tests.multirank.check_on import check_on
from tests.multirank.ranks import RankPool
from tests.tiers import slow
from tests.zoo.plain.models import BY_NAME, MODELS, case_of


def check(pool: RankPool, model: type[nn.Module], job: tuple[Layout, str]) -> CheckReport:
    layout, schedule = job

    options = CheckOptions(
        schedule, num_microbatches=3, microbatch=4, steps=2, evaluate=layout.tp > 1
    )
    checked = Job(case_of(model), layout, options)
    report = check_on(pool, checked)
    assert report.segments > 1
    return report


ESSENTIAL = (
    "Shared", "InPlace",
)  # fmt: skip
"""Those that `make test` trains; `make test-all` trains all."""


# torch warns of its own reentrant checkpoints where no gradient is asked for.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize(
    "model",
    [model if model.__name__ in ESSENTIAL else slow(model) for model in MODELS],
    ids=lambda model: model.__name__,
)
def test_split_and_as_a_pipeline(pool: RankPool, model: type[nn.Module]) -> None:
    report = check(pool, model, (Layout(tp=2, pp=2), "1f1b"))
    assert report.evaluation_max_rel_diff is not None


@pytest.mark.parametrize("name", ["ResNet", slow("UNet")])
def test_recomputed(pool: RankPool, name: str) -> None:
    check(pool, BY_NAME[name], (Layout(pp=2), "early_recompute"))
