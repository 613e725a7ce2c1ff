"""Decisions about another layout, from times that ranks would measure."""

from __future__ import annotations

import logging

import pytest

from merak.engine.planning.choose import Job
from merak.engine.planning.replan import Replanner
from merak.plan.expected.measured import RankTimes
from merak.plan.price.candidate import Candidate
from merak.plan.price.step import price, step_parts
from merak.plan.search.pinned import Pinned
from merak.plan.search.plan_file import candidate_from
from merak.zoo.workload import example_workload
from tests.unit.plan.price.test_step import LLAMA, adam, cluster

CLUSTER = cluster(count=1)
REPLICAS = Candidate(dp=2, microbatch=4, num_microbatches=4)


@pytest.fixture(scope="module")
def job() -> Job:
    workload = example_workload(LLAMA, global_batch=32, sequence=16, optimizer=adam)
    return Job(workload, CLUSTER, lambda _: None)


def replanner(job: Job, *, moves: bool = True) -> Replanner:
    pinned = Pinned(microbatch=4, schedule="1f1b", recompute="off", tp=1, zero=0)
    return Replanner(job, pinned, REPLICAS, moves, "as it is")


def times(
    job: Job, plan: Candidate, factors: tuple[float, float], step_s: float
) -> list[RankTimes]:
    """What two ranks measure whose segments take so many times their price."""
    parts = step_parts(job.workload, CLUSTER, plan)
    own = [n // plan.stage_ranks for n in range(2)]
    return [RankTimes(step_s, f * parts.busy_s[n], 0.0) for f, n in zip(factors, own, strict=True)]


def test_a_job_stays_where_it_is_as_fast_as_priced(job: Job) -> None:
    step_s = price(job.workload, CLUSTER, REPLICAS).step_s
    assert replanner(job)._decide(times(job, REPLICAS, (1.0, 1.0), step_s)) is None


@pytest.mark.parametrize("lasts", [False, True])
def test_a_slow_rank_asks_for_another_layout_unless_other_work_takes_the_time(
    job: Job, lasts: bool
) -> None:
    step_s = 6 * price(job.workload, CLUSTER, REPLICAS).step_s
    found = replanner(job)._decide(
        times(job, REPLICAS, (1.0, 6.0), 100 * step_s if lasts else step_s)
    )
    assert (found is None) == lasts
    if found is not None:
        first, last = candidate_from(found).partition or ()
        assert first > last


def test_a_layout_that_was_left_counts_as_it_was_measured(job: Job) -> None:
    own = replanner(job)
    step_s = 6 * price(job.workload, CLUSTER, REPLICAS).step_s
    found = own._decide(times(job, REPLICAS, (1.0, 6.0), step_s))
    assert found is not None
    own.plan = candidate_from(found)
    # Were it not for what the steps took before, the price would say that nothing else is faster.
    back = own._decide(times(job, own.plan, (1.0, 6.0), 2 * step_s))
    assert back is not None and candidate_from(back) == REPLICAS
    own.plan = REPLICAS
    assert own._decide(times(job, REPLICAS, (1.0, 6.0), step_s)) is None


def test_a_job_that_may_not_move_stays(job: Job) -> None:
    step_s = 6 * price(job.workload, CLUSTER, REPLICAS).step_s
    assert replanner(job, moves=False)._decide(times(job, REPLICAS, (1.0, 6.0), step_s)) is None


def test_a_model_that_cannot_be_copied_is_not_compared(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("no copies")

    model = job.workload.source.model
    monkeypatch.setattr(type(model), "__deepcopy__", refuse, raising=False)
    own = replanner(job)
    own.keep_model()
    with caplog.at_level(logging.WARNING):
        assert own._decide(times(job, REPLICAS, (1.0, 6.0), 1.0)) is None
    assert "cannot be compared with the plan: no copies" in caplog.text
