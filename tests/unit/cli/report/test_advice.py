"""Advice about runs whose steps lose time in one known way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from merak.cli.report.advice import Advice, advise
from merak.cli.report.study import study_step
from merak.record.run import RunRecord
from merak.schedule.costs import Costs, Link, stage_costs
from merak.schedule.ir import Schedule
from merak.schedule.registry import build
from tests.unit.record.runs import GB, job_of, log_of, step_of


def plain(name: str, ranks: int, microbatches: int) -> Schedule:
    """A schedule that recomputes nothing."""
    from merak.schedule.changes import recomputing

    made = build(name, ranks, microbatches)
    return recomputing(made, (False,) * made.num_stages)


def run_of(schedule: Schedule, costs: Costs, sizes: tuple[int, ...]) -> RunRecord:
    steps = tuple(step_of(schedule, costs, number) for number in (10, 14))
    return RunRecord(job_of(schedule, sizes), (log_of(10, schedule.num_ranks),), steps)


def found(run: RunRecord, word: str) -> Advice | None:
    return next((own for own in advise(run, study_step(run)) if word in own.do), None)


def test_few_microbatches() -> None:
    run = run_of(plain("1f1b", 4, 4), stage_costs((1.0,) * 4, (2.0,) * 4), (2, 2, 2, 2))
    own = found(run, "gradient_accumulation_steps=16")
    assert own is not None and "its bubble is 43 %; a part of it" in own.what
    assert "with per_device_train_batch_size=1 or 4 times the samples a step" in own.do
    single = replace(run, job=replace(run.job, microbatch=(1, 128)))
    one = found(single, "gradient_accumulation_steps=16 with 4 times the samples a step")
    assert one is not None
    assert "16 microbatches leave a bubble of 16 %" in own.do
    # 3 · (4 + 3) = 21 for four microbatches now, and 3 · (16 + 3) / 4 = 14.25.
    assert own.gain == pytest.approx(1 - 14.25 / 21)
    many = run_of(plain("1f1b", 4, 64), stage_costs((1.0,) * 4, (2.0,) * 4), (2, 2, 2, 2))
    assert found(many, "Try gradient_accumulation_steps") is None


def test_an_uneven_partition() -> None:
    costs = stage_costs((4.0, 2.0), (8.0, 4.0))
    run = run_of(plain("1f1b", 2, 16), costs, (4, 2))
    own = found(run, "partition=[3, 3]")
    assert own is not None and "in place of [4, 2]" in own.do
    assert "Stage 0 (pp rank 0) computes 12 s for a microbatch, the other stages 6 s" in own.what
    assert own.gain is not None and 0.1 < own.gain < 0.3
    even = run_of(plain("1f1b", 2, 16), stage_costs((3.0, 3.0), (6.0, 6.0)), (3, 3))
    assert found(even, "partition") is None


def test_stages_that_no_partition_evens_out() -> None:
    costs = stage_costs((4.0, 1.0), (8.0, 2.0))
    run = run_of(plain("1f1b", 2, 16), costs, (1, 1))
    own = found(run, "No other partition")
    assert own is not None and own.gain is None


def test_another_schedule() -> None:
    run = run_of(plain("1f1b", 4, 8), stage_costs((1.0,) * 4, (2.0,) * 4), (2, 2, 2, 2))
    own = found(run, "Try schedule=")
    assert own is not None and own.gain is not None and own.gain > 0.05
    assert "schedule='1f1b' takes" in own.what and "microbatches in flight" in own.do


def test_transfers() -> None:
    costs = stage_costs((1.0, 1.0), (2.0, 2.0), links=(Link(0.5),))
    run = run_of(plain("1f1b", 2, 16), costs, (3, 3))
    own = found(run, "neighbouring stages are on one host")
    assert own is not None and "500 ms from one stage to the next" in own.what


def test_time_outside_the_pipeline() -> None:
    run = run_of(plain("1f1b", 1, 4), stage_costs((0.05,), (0.1,)), (4,))
    steps = (run.steps[0], replace(step_of(run.job.schedule, stage_costs((0.05,), (0.1,)), 11)))
    own = found(replace(run, steps=steps), "dataloader_num_workers")
    assert own is not None and own.what.startswith("400 ms of a step (40 %) are outside")


def test_reductions_behind_the_last_backward() -> None:
    run = run_of(plain("1f1b", 1, 4), stage_costs((0.05,), (0.1,)), (4,))
    (begin, end), *_ = run.steps[0].spans
    late = tuple(
        replace(step, spans=((step.spans[0][0], step.spans[0][1] + 0.2),)) for step in run.steps
    )
    own = found(replace(run, steps=late), "gradient_compression")
    assert end - begin == pytest.approx(0.6)
    assert own is not None and "goes on for 200 ms (25 %) behind its last backward" in own.what


def test_a_stage_on_a_slow_device() -> None:
    # Expected: 0.02 s forward and 0.04 s backward of every stage.
    costs = stage_costs((0.02, 0.02, 0.03), (0.04, 0.04, 0.06))
    own = found(run_of(plain("1f1b", 3, 32), costs, (2, 2, 2)), "merak profile measures both")
    assert own is not None and own.what.startswith("Stage 2 takes 1.5 times as long as estimated")


def test_memory_above_its_forecast_and_free_memory() -> None:
    run = run_of(plain("1f1b", 2, 4), stage_costs((1.0, 1.0), (2.0, 2.0)), (3, 3))
    above = replace(run, logs=(replace(run.logs[0], memory_bytes=(60 * GB, 40 * GB)),))
    own = next(a for a in advise(above, None) if "forecast" in a.what)
    assert own.what == "pp rank 0 has held 60.0 GB, and its forecast is 50.0 GB (20 % more)."
    free = next(a for a in advise(run, None) if "fullest" in a.what)
    assert free.what == "The fullest rank has held 48.0 GB of 80.0 GB."
    on_cpu = replace(above, job=replace(run.job, on_gpu=False))
    assert advise(on_cpu, None) == ()


def test_the_largest_gain_comes_first_and_a_good_run_needs_nothing() -> None:
    run = run_of(plain("1f1b", 4, 4), stage_costs((1.0,) * 4, (2.0,) * 4), (2, 2, 2, 2))
    gains = [own.gain or 0.0 for own in advise(run, study_step(run))]
    assert gains == sorted(gains, reverse=True) and len(gains) >= 2
    alone = run_of(plain("1f1b", 1, 4), stage_costs((1.0,), (2.0,)), (4,))
    full = replace(alone, job=replace(alone.job, device_bytes=50 * GB))
    assert advise(full, study_step(full)) == ()
