"""Jobs on the ranks of a pool, compared with one process by `merak.check`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from merak.check import CheckReport, Job, Workspace, check_against
from merak.check.reference import reference
from merak.check.runs import Outcome
from merak.core.files.private_files import private_folder
from tests import shared_cache
from tests.multirank.ranks import RankPool


def launcher(pool: RankPool) -> Callable[..., Any]:
    """What starts the ranks of a check: those of the pool."""

    def launch(function: Callable[..., Any], arguments: tuple[Any, ...], num_ranks: int) -> Any:
        return pool.run(function, num_ranks, *arguments)

    return launch


def check_on(pool: RankPool, job: Job, expected: Outcome | None = None) -> CheckReport:
    """Report of a job that trains as in one process, which is asserted.

    Args:
        pool: whose ranks train it.
        job: the model, its layout and options.
        expected: what one process has seen of it; None to train it here.
    """
    # A folder for each process of the run: its traces are read again, its outcomes written over.
    folder = shared_cache.FOLDER / f"checks-{os.environ.get('PYTEST_XDIST_WORKER', 'alone')}"
    private_folder(folder)
    report = check_against(expected or reference(job), job, Workspace(folder, launcher(pool)))
    assert (report.ok, report.reason) == (True, None)
    return report
