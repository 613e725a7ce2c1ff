"""CTC losses on real ranks: gradients as in one process."""

from __future__ import annotations

import pytest

from merak.check import CheckOptions, Job, Layout
from merak.check.case import Case
from tests.multirank.check_on import check_on
from tests.multirank.ranks import RankPool
from tests.tiers import slow
from tests.unit.graph.speech import Indexed, Picked, speech

OPTIONS = CheckOptions("1f1b", num_microbatches=2, microbatch=4, steps=2)
BY_NAME = {kind.__name__: kind for kind in (Picked, Indexed)}


@pytest.mark.parametrize("name", ["Picked", slow("Indexed")])
def test_as_one_process(pool: RankPool, name: str) -> None:
    job = Job(Case(name, BY_NAME[name], speech), Layout(tp=2, pp=2), OPTIONS)
    report = check_on(pool, job)
    assert report.tolerance == 1e-5
    assert report.segments > 1
