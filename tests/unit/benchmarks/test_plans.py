"""The rules that the benchmarks compare the planner with."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from merak.plan.partition import from_sizes

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("tools.plans")


def test_the_papers_ratios(plans: ModuleType) -> None:
    # Written out from the formula with s = 8 and α_1 = 0.3: 7 · 0.3 / (8 − i), at most 1.
    expected = (0.3, 0.35, 0.42, 0.525, 0.7, 1.0, 1.0, 1.0)
    assert plans.paper_ratios(0.3, 8) == pytest.approx(expected)
    assert plans.paper_ratios(0.1, 4) == pytest.approx((0.1, 0.15, 0.15, 1.0))
    assert plans.paper_ratios(0.5, 2) == pytest.approx((0.5, 1.0))
    assert plans.paper_ratios(0.5, 1) == (1.0,)


def test_ratios_save_the_first_segments_of_a_stage(plans: ModuleType) -> None:
    assert plans.first_of_stages(from_sizes((4, 4), 8), (0.5, 0.99)) == {0, 1, 4, 5, 6}
