"""What makes a run of tests long, counted: the same numbers on every machine, which times are not.

Every process of a run counts into one file of the run's folder; the process that has started them
compares the sums with the budget of the tier.
"""

from __future__ import annotations

import functools
import multiprocessing.process
import os
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

FILE = Path(os.environ["MERAK_CACHE"]) / "causes"
"""A line for each cause, with its test; in the run's own folder: see `tests/conftest.py`."""

BUDGETS: Mapping[str, Mapping[str, int]] = {
    "not slow": {"jobs of ranks": 380, "processes started": 200, "models traced": 3040},
}
"""The most that a tier may have, by the expression of marks that chooses its tests."""


def _counted(owner: Any, name: str, cause: str) -> None:
    """Count the calls of a method or function of a module."""
    called: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(called)
    def counted(*args: Any, **kwargs: Any) -> Any:
        with FILE.open("a") as file:  # a line at once, from whichever process
            file.write(f"{cause}\t{os.environ.get('PYTEST_CURRENT_TEST', '')}\n")
        return called(*args, **kwargs)

    setattr(owner, name, counted)


@functools.cache
def count() -> None:
    """Count what this process causes from now on."""
    from merak.graph.trace import trace
    from tests.multirank.ranks import RankPool

    _counted(RankPool, "run", "jobs of ranks")
    _counted(subprocess.Popen, "__init__", "processes started")
    _counted(multiprocessing.process.BaseProcess, "start", "processes started")
    # Entered for every export, and left before a model runs: errors name the lines that call it.
    _counted(trace, "lean_export", "models traced")


def counts() -> Mapping[str, int]:
    """How often each cause has come so far, in all processes of the run."""
    return Counter(cause for cause, _ in _lines())


def largest(most: int = 8) -> list[str]:
    """A sentence for each cause: the files of tests that have it most often, and how often."""
    found: dict[str, Counter[str]] = {}
    for cause, test in _lines():
        found.setdefault(cause, Counter())[test.partition("::")[0].removeprefix("tests/")] += 1
    return [
        f"{cause}: " + ", ".join(f"{file} {n}" for file, n in of_files.most_common(most))
        for cause, of_files in sorted(found.items())
    ]


def _lines() -> list[tuple[str, str]]:
    """Each cause so far, with its test."""
    lines = FILE.read_text().splitlines() if FILE.exists() else ()
    return [(cause, test) for cause, _, test in (line.partition("\t") for line in lines)]


def over_budget(tier: str, counted: Mapping[str, int]) -> list[str]:
    """A sentence for each cause that a tier has more often than its budget allows.

    Args:
        tier: the expression of marks that chose the tests.
        counted: how often each cause came, of all tests of the tier or of some.
    """
    return [
        f"{counted[cause]} {cause}, where the tests marked `{tier}` may have {most}: share what "
        f"others have computed, mark rows as slow, or raise the budget in {__name__}."
        for cause, most in BUDGETS.get(tier, {}).items()
        if counted.get(cause, 0) > most
    ]
