"""CTC losses on real ranks: gradients as in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from merak.check import CheckOptions, Job, Layout, Workspace, check_against
from merak.check.case import Case
from merak.check.reference import reference
from tests.multirank.ranks import RankPool
from tests.unit.graph.speech import Indexed, Picked, speech

OPTIONS = CheckOptions("1f1b", num_microbatches=2, microbatch=4, steps=2)
BY_NAME = {kind.__name__: kind for kind in (Picked, Indexed)}


@pytest.mark.parametrize("name", BY_NAME)
def test_as_one_process(pool: RankPool, name: str, tmp_path: Path) -> None:
    job = Job(Case(name, BY_NAME[name], speech), Layout(tp=2, pp=2), OPTIONS)
    workspace = Workspace(tmp_path, lambda f, args, ranks: pool.run(f, ranks, *args))
    report = check_against(reference(job), job, workspace)
    assert report.reason is None
    assert report.tolerance == 1e-5
    assert report.segments > 1
