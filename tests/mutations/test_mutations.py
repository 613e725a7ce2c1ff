"""Every mistake on purpose is noticed by the tests that its row names."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.mutations.mutation import REACHED, VARIABLE, Mutation, TargetGoneError, apply
from tests.mutations.page import render
from tests.mutations.table import MUTATIONS
from tests.tiers import slow

ROOT = Path(__file__).resolve().parents[2]


PARTS = "tests/multirank/test_check_of_parts.py::test_it_trains_as_in_one_process"


ESSENTIAL = (
    "gradients_scaled_twice", "bias_added_on_every_rank", "dropout_equal_on_ranks",
)  # fmt: skip
"""Those that `make test` makes: of the engine, of collectives and of draws; in seconds each."""


@pytest.mark.parametrize("name", [n if n in ESSENTIAL else slow(n, id=n) for n in MUTATIONS])
def test_a_mistake_is_noticed(name: str, tmp_path: Path) -> None:
    assert_noticed(MUTATIONS[name], MUTATIONS[name].tests, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, m in MUTATIONS.items() if m.check is not None])
def test_merak_check_finds_it(name: str, tmp_path: Path) -> None:
    assert_noticed(MUTATIONS[name], (f"{PARTS}[{MUTATIONS[name].check}]",), tmp_path)


def test_the_page_is_that_of_the_table() -> None:
    assert (ROOT / "docs" / "mutations.md").read_text(encoding="utf-8") == render(
        MUTATIONS.values()
    )


def assert_noticed(mutation: Mutation, tests: Sequence[str], tmp_path: Path) -> None:
    """Run tests with a mistake in all their processes; each must fail, by an assertion."""
    report, reached = tmp_path / "report.xml", tmp_path / "reached"
    environment = {**os.environ, VARIABLE: mutation.name, REACHED: str(reached)}
    environment.pop("PYTEST_XDIST_WORKER", None)  # it has traces of its own
    words = [*tests, "-q", "-p", "no:cacheprovider", f"--junit-xml={report}"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert report.exists(), run.stdout + run.stderr
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    assert len(cases) == len(tests), run.stdout
    assert reached.exists(), f"no test called {mutation.target}"
    for case in cases:
        failure = case.find("failure")
        assert failure is not None, f"{case.get('name')} did not notice: {mutation.mistake}"
        assert "AssertionError" in (failure.text or ""), failure.text


def test_a_mutation_whose_function_is_gone_says_so() -> None:
    for target in ("merak.engine.nowhere:run", "merak.engine.engine:Engine.nothing"):
        with pytest.raises(TargetGoneError, match="which is gone"):
            apply(Mutation("gone", "", target, lambda right: right, ()))
