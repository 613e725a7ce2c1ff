"""Rules that a record keeps beyond the types of its fields, for records that somebody changed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from merak.record.run import JobRecord, LogRecord, MeasuredStep

MOST = 2.0**80
"""Above every size, count and rate of a job."""

MOST_RANKS = 2**24
"""Above every number of ranks, each of which has a place in a picture."""

LAST_S = 2.0**37
"""Time after which calendars end, s since the epoch."""

_AXES = ("dp", "tp", "pp", "cp", "ep")


def job_problems(job: JobRecord) -> Iterator[str]:
    """Yield what of a job cannot be together.

    Args:
        job: whose fields have the right types, with a valid schedule.
    """
    for axis in _AXES:
        if not 1 <= job.degrees.get(axis, 0) <= MOST_RANKS:
            yield f"degrees.{axis} is no degree"
            return
    pp, stages = job.degrees["pp"], job.schedule.num_stages
    if job.num_ranks > MOST_RANKS:
        yield f"its degrees make {job.num_ranks} ranks"
    if job.schedule.num_ranks != pp:
        yield f"its schedule has {job.schedule.num_ranks} ranks, and pp is {pp}"
    if len(job.stages) != stages or sorted(i for own in job.stages for i in own) != list(
        range(len(job.segments))
    ):
        yield "its stages do not have every segment once"
    for name, number in (("memory", pp), ("base_bytes", pp), ("recompute_s", stages)):
        if len(getattr(job, name)) not in (0, number):
            yield f"{name} has {len(getattr(job, name))} entries, not {number}"
    if len(job.hosts) not in (0, job.num_ranks):
        yield f"hosts has {len(job.hosts)} entries, not {job.num_ranks}"
    figures = [*job.microbatch, job.parameters, job.flops, job.device_bytes or 0]
    figures += [*job.recompute_s, job.peak_flops_per_s or 0]
    for own in job.segments:
        figures += [own.parameters, own.forward_s or 0, own.backward_s or 0]
    for held in job.memory:
        figures += [held.peak_bytes, held.parameters, held.gradients]
        figures += [held.optimizer, held.activations]
    if not all(0 <= figure <= MOST for figure in figures):
        yield "a figure is below 0, or above all that a computer has"
    if not all(held.peak_bytes for held in job.memory):
        yield "a rank has no memory"


def log_problems(log: LogRecord) -> Iterator[str]:
    """Yield what of a log cannot be.

    Args:
        log: whose fields have the right types.
    """
    figures = [log.step, log.time_s, *log.busy, *(own or 0 for own in log.memory_bytes)]
    if not all(0 <= figure <= MOST for figure in figures) or log.time_s > LAST_S:
        yield "a figure is below 0, or above all that a computer has"


def step_problems(step: MeasuredStep) -> Iterator[str]:
    """Yield what of a measured step cannot be.

    Args:
        step: whose fields have the right types, with a valid schedule.
    """
    schedule = step.schedule
    if not len(step.records) == len(step.spans) == schedule.num_ranks:
        yield f"a step has {len(step.records)} ranks, and its schedule {schedule.num_ranks}"
        return
    for own, actions in zip(step.records, schedule.actions, strict=True):
        if Counter(action for action, _, _ in own) != Counter(actions) and own:
            yield "a step has other actions than its schedule"
            return
    times = [t for own in step.records for _, *both in own for t in both]
    times += [t for span in step.spans for t in span]
    if not all(math.isfinite(t) and abs(t) <= MOST for t in times):
        yield "a step has a time that is none"
