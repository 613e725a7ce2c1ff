"""What scripts do with a trainer gives the same on many ranks as in transformers, or a reason."""

from __future__ import annotations

from functools import cache as remembered
from pathlib import Path
from typing import Any

import pytest

from tests.multirank.drop_in_run import differences, of_merak, of_transformers
from tests.multirank.drop_in_scenarios import SCENARIOS, Seen
from tests.multirank.ranks import RankPool
from tests.multirank.training import Layout
from tests.tiers import slow

LAYOUTS: dict[str, Layout] = {"dp": (2, 1, 1), "tp": (1, 2, 1), "pp": (1, 1, 2)}
ESSENTIAL = {
    "a_callback_stops_by_the_clock_of_one_rank": "dp",
    "prepare_inputs_is_overridden": "tp",
    "the_main_input_is_not_named": "pp",
    "the_best_checkpoint_has_only_a_model": "pp",
}


def rows() -> list[Any]:
    """Each scenario in one layout, those of one kind in all; what is refused wherever it is."""
    found = []
    for number, (name, one) in enumerate(SCENARIOS.items()):
        axes = one.axes if one.refused else (list(LAYOUTS)[number % len(LAYOUTS)],)
        found += [slow(name, axis) for axis in axes if ESSENTIAL.get(name) != axis]
        found += [(name, ESSENTIAL[name])] if name in ESSENTIAL else []
    return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What transformers gives in one process, once for each scenario."""

    @remembered
    def of(name: str) -> Seen:
        return of_transformers(name, str(tmp_path_factory.mktemp("alone")))

    return of


@pytest.mark.parametrize("name,axis", rows())
def test_scenario(
    pool: RankPool, cache: str, tmp_path: Path, expected: Any, name: str, axis: str
) -> None:
    ranks = pool.run(of_merak, 2, LAYOUTS[axis], name, str(tmp_path), cache, timeout_s=120)
    refused = SCENARIOS[name].refused if axis in SCENARIOS[name].axes else None
    assert not differences(ranks, None if refused else expected(name), refused)


def test_there_are_thirty_of_them() -> None:
    assert len(SCENARIOS) >= 30
