"""Choices that hang on the batch alone, on real ranks: each microbatch takes its own way."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from merak.check import Case, CheckOptions, Job, Layout
from tests.multirank.check_on import check_on
from tests.multirank.ranks import RankPool
from tests.tiers import slow
from tests.unit.graph.trace.branches.test_batch_choices import LongTexts, Padded


def batch_of(step: int, samples: int) -> dict[str, torch.Tensor]:
    """Only the first samples have padding, or a token beyond the eighth."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randint(1, 8, (samples, 6), generator=generator)
    y = torch.randint(0, 11, (samples, 6), generator=generator)
    x[:3, 4:] = torch.tensor([0, 10])
    return {"x": x, "y": y}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        (Padded, Layout(tp=2, pp=2)),
        slow(LongTexts, Layout(dp=2, pp=2)),
    ],
)
def test_as_in_one_process(pool: RankPool, kind: type[nn.Module], layout: Layout) -> None:
    options = CheckOptions("1f1b", num_microbatches=3, steps=2, evaluate=layout.dp == 1)
    checked = Job(Case(kind.__name__, kind, batch_of), layout, options)
    report = check_on(pool, checked)
    assert report.segments > 4 and not report.kept_whole
