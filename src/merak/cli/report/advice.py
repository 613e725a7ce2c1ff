"""Advice about a run: what its step loses where, in figures, and what to try."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from merak.cli.report.study import StepStudy
from merak.core.errors import MerakError
from merak.core.units import size
from merak.plan.balance import balance
from merak.plan.cost.measured_times import SegmentTimes
from merak.plan.partition import Partition
from merak.record.idle import Cause
from merak.record.replay import even, expected_costs
from merak.record.run import RunRecord
from merak.schedule.changes import recomputing
from merak.schedule.costs import Costs
from merak.schedule.ir import Schedule
from merak.schedule.registry import build, names, takes_costs
from merak.schedule.simulator.simulate import simulate

WORTH = 0.03
"""Fraction of a step from which something is worth advice."""


@dataclass(frozen=True, slots=True)
class Advice:
    """Advice, with the figures behind it.

    Args:
        what: a sentence that says what was found.
        do: a sentence that says what to try.
        gain: fraction of the step's time that it would save, simulated with the measured times;
            None where only trying tells.
    """

    what: str
    do: str
    gain: float | None = None


def advise(run: RunRecord, study: StepStudy | None) -> tuple[Advice, ...]:
    """Advice about a run, the largest gain first.

    Args:
        run: its record.
        study: of a typical step; None where none was measured.
    """
    found = list(_memory(run))
    if study is not None:
        found += [advice for rule in RULES for advice in rule(run, study)]
    return tuple(sorted(found, key=lambda own: -(own.gain or 0.0)))


def percent(fraction: float) -> str:
    """Format a fraction in full percent."""
    return f"{100 * fraction:.0f} %"


def milliseconds(seconds: float) -> str:
    """Format a duration of some milliseconds, or of seconds."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _saved(study: StepStudy, simulated_s: float, now_s: float) -> float:
    """Fraction of the whole step that a shorter pipeline saves."""
    return (now_s - simulated_s) / (study.period_s or 1.0)


# ---- rules ----


def _few_microbatches(run: RunRecord, study: StepStudy) -> Iterator[Advice]:
    """Fill and drain are paid once a step: more microbatches share them."""
    schedule = study.step.schedule
    if study.num_ranks == 1:
        return
    now = simulate(schedule, study.costs)
    if now.bubble_fraction < 2 * WORTH:
        return
    samples = run.job.microbatch[0] if run.job.microbatch else 1
    for factor in (4, 2):
        more = _built(schedule.name, study, schedule.num_microbatches * factor)
        if more is None:
            continue
        other = simulate(more, study.costs)
        gain = 1 - other.makespan / factor / now.makespan
        if gain < WORTH:
            return
        count = more.num_microbatches
        smaller = f"per_device_train_batch_size={samples // factor} or "
        yield Advice(
            f"A step has {schedule.num_microbatches} microbatches for {study.num_ranks} pp ranks. "
            f"Simulated with the measured times and transfers, its bubble is "
            f"{percent(now.bubble_fraction)}; a part of it is that the pipeline fills and drains "
            "once a step.",
            f"Try gradient_accumulation_steps={count} with "
            f"{smaller if samples % factor == 0 else ''}{factor} times the samples a step: {count} "
            f"microbatches leave a bubble of {percent(other.bubble_fraction)}.",
            gain * study.step.pipeline_s / (study.period_s or 1.0),
        )
        return


def _uneven_stages(run: RunRecord, study: StepStudy) -> Iterator[Advice]:
    """The slowest stage sets the pace of all others."""
    costs, schedule = study.costs, study.step.schedule
    work = _work(costs)
    if study.num_ranks == 1:
        return
    now = simulate(schedule, costs).makespan
    lost = _saved(study, simulate(schedule, even(costs)).makespan, now)
    if lost < WORTH:
        return
    slowest = max(range(len(work)), key=work.__getitem__)
    others = fmean(own for stage, own in enumerate(work) if stage != slowest)
    rank = schedule.ranks_of(slowest)[0]
    waits = max(range(study.num_ranks), key=lambda r: study.shares(r)[Cause.WAIT])
    share = study.shares(waits)[Cause.WAIT]
    what = (
        f"Stage {slowest} (pp rank {rank}) computes {milliseconds(work[slowest])} for a "
        f"microbatch, the other stages {milliseconds(others)} on average, which costs "
        f"{percent(lost)} of a step; pp rank {waits} waits {percent(share)} for other stages."
    )
    better = _rebalanced(run, study)
    if better is None:
        yield Advice(
            what,
            "No other partition of its segments is faster by the measured times; another pp, or a "
            "tp that splits the large segments, would even it out.",
        )
        return
    partition, gain = better
    yield Advice(
        what,
        f"Try partition={list(partition.sizes)} in place of {[len(own) for own in run.job.stages]} "
        "(segments of every stage).",
        gain,
    )


def _other_schedule(run: RunRecord, study: StepStudy) -> Iterator[Advice]:
    """Another order of the same actions, with the same stages on the same ranks."""
    own = study.step.schedule
    if study.num_ranks == 1 or not own.is_synchronous:
        return
    now = simulate(own, study.costs)
    best: tuple[float, int, str, bool] | None = None
    for name in names():
        other = None if name == own.name or takes_costs(name) else _built(name, study)
        if other is None or other.pipes != own.pipes or not other.is_synchronous:
            continue
        found = simulate(other, study.costs)
        candidate = found.makespan, max(found.peak_in_flight), name, other.splits_backwards
        best = candidate if best is None else min(best, candidate)
    if best is None or _saved(study, best[0], now.makespan) < WORTH:
        return
    held = max(now.peak_in_flight)
    memory = (
        f"it has at most {best[1]} microbatches in flight on a rank, {held} now"
        if best[1] != held
        else f"it has as many microbatches in flight ({held})"
    )
    yield Advice(
        f"With the measured times, schedule={own.name!r} takes {milliseconds(now.makespan)}.",
        f"Try schedule={best[2]!r}: simulated, it takes {milliseconds(best[0])}; {memory}."
        + (
            " The parts of its split backwards count half each."
            if best[3] and not own.splits_backwards
            else ""
        ),
        _saved(study, best[0], now.makespan),
    )


def _transfers(run: RunRecord, study: StepStudy) -> Iterator[Advice]:
    """Ranks that wait for an output on its way."""
    rank = max(range(study.num_ranks), key=lambda r: study.shares(r)[Cause.TRANSFER])
    share = study.shares(rank)[Cause.TRANSFER]
    if share < WORTH:
        return
    lengths = [link.latency_s for link in study.costs.links]
    yield Advice(
        f"pp rank {rank} waits {percent(share)} of the step for transfers, which take up to "
        f"{milliseconds(max(lengths))} from one stage to the next.",
        "Try a layout in which neighbouring stages are on one host, fewer stages, or larger "
        "microbatches; merak profile measures the links, and merak plan finds a layout for them.",
        share * study.step.pipeline_s / (study.period_s or 1.0) / 2,
    )


def _between_actions(run: RunRecord, study: StepStudy) -> Iterator[Advice]:
    """Ranks whose input is there, and which do not compute."""
    rank = max(range(study.num_ranks), key=lambda r: study.shares(r)[Cause.HOST])
    share = study.shares(rank)[Cause.HOST]
    if share < WORTH:
        return
    yield Advice(
        f"pp rank {rank} is idle {percent(share)} of the step between actions although its input "
        "is there: that is Python, launches and copies.",
        "Try larger microbatches (per_device_train_batch_size), which make fewer and longer "
        "actions; merak doctor tells whether the CPU is shared or slow.",
    )


def _outside(run: RunRecord, study: StepStudy) -> Iterator[Advice]:
    """Time between two steps: data, optimizer, callbacks."""
    share = (study.outside_s or 0.0) / (study.period_s or 1.0)
    if study.outside_s is None or share < WORTH:
        return
    yield Advice(
        f"{milliseconds(study.outside_s)} of a step ({percent(share)}) are outside the pipeline: "
        "reading data, clipping, the optimizer and callbacks.",
        "Try dataloader_num_workers=2 or more if data is prepared on the fly, "
        "zero=1 with several replicas, and a larger logging_steps.",
    )


def _reductions(run: RunRecord, study: StepStudy) -> Iterator[Advice]:
    """Gradients that are still being reduced when the last backward is done."""
    share = study.reduction_s / (study.period_s or 1.0)
    if share < WORTH:
        return
    replicas = run.job.degrees["dp"] * run.job.degrees.get("cp", 1)
    what_for = (
        f"reduce gradients over {replicas} replicas and to sum losses"
        if replicas > 1
        else "send the losses to all ranks"
    )
    yield Advice(
        f"The step goes on for {milliseconds(study.reduction_s)} ({percent(share)}) behind its "
        f"last backward, to {what_for}.",
        "Try more microbatches a step, which reduce as often as few; "
        "gradient_compression='bf16' halves what is sent."
        if replicas > 1
        else "Other programs on these hosts may delay it; merak doctor looks at what they share.",
    )


def _slow_stage(run: RunRecord, study: StepStudy) -> Iterator[Advice]:
    """A stage that is slower than expected while others are not: its device, not the model."""
    known = expected_costs(run.job)
    expected = [] if known is None else _work(known)
    work = _work(study.costs)
    if len(work) != len(expected) or len(work) < 2 or not all(expected):
        return
    ratios = [own / estimate for own, estimate in zip(work, expected, strict=True)]
    usual = median(ratios)
    worst = max(range(len(ratios)), key=ratios.__getitem__)
    if ratios[worst] < 1.25 * usual:
        return
    ranks = study.step.schedule.ranks_of(worst)
    yield Advice(
        f"Stage {worst} takes {ratios[worst]:.2g} times as long as estimated, and the stages "
        f"{usual:.2g} times in the median.",
        f"The device of pp rank {ranks[0]} may be slower than the others (heat, another program), "
        "or the estimate is wrong for its operators: merak profile measures both, and "
        "segment_times=FILE gives the balance measured times.",
    )


def _memory(run: RunRecord) -> Iterator[Advice]:
    """Memory of GPUs that differs from its forecast, or that is free."""
    job = run.job
    if not job.on_gpu or not job.memory or not run.logs or not run.logs[-1].memory_bytes:
        return
    used = run.logs[-1].memory_bytes
    for rank, (own, forecast) in enumerate(zip(used, job.memory)):
        if own is not None and own > 1.1 * forecast.peak_bytes:
            yield Advice(
                f"pp rank {rank} has held {size(own)}, and its forecast is "
                f"{size(forecast.peak_bytes)} ({percent(own / forecast.peak_bytes - 1)} more).",
                "Longer samples than the first batch had, or code of your own that keeps tensors, "
                "would explain it; with recompute='auto', lower memory_budget by as much.",
            )
    most = max((own for own in used if own is not None), default=0)
    if not job.device_bytes or not most or most > 0.7 * job.device_bytes:
        return
    free = f"The fullest rank has held {size(most)} of {size(job.device_bytes)}."
    if any(job.schedule.recompute):
        yield Advice(
            free,
            "Try recompute='auto', which saves as many activations as fit in place of recomputing "
            "all of them.",
        )
    else:
        yield Advice(
            free,
            "Try a larger per_device_train_batch_size with fewer gradient_accumulation_steps, or "
            "per_device_train_batch_size='auto'.",
        )


RULES: Sequence[Callable[[RunRecord, StepStudy], Iterator[Advice]]] = (
    _few_microbatches,
    _uneven_stages,
    _other_schedule,
    _transfers,
    _between_actions,
    _outside,
    _reductions,
    _slow_stage,
)


# ---- other layouts ----


def _work(costs: Costs) -> list[float]:
    """Seconds of a microbatch on every stage, recomputation apart."""
    return [f + b for f, b in zip(costs.forward_s, costs.backward_s, strict=True)]


def _built(name: str, study: StepStudy, microbatches: int | None = None) -> Schedule | None:
    """A schedule of the catalog with this step's stages and recomputation; None for none."""
    own = study.step.schedule
    try:
        made = build(name, own.num_ranks, microbatches or own.num_microbatches)
        return recomputing(made, own.recompute)
    except MerakError:
        return None


def _rebalanced(run: RunRecord, study: StepStudy) -> tuple[Partition, float] | None:
    """The partition that is best by the measured times, and what it saves; None for this one."""
    job, costs = run.job, study.costs
    if not job.has_times or len(job.stages) != costs.num_stages:
        return None
    times: list[SegmentTimes] = []
    for stage, own in enumerate(job.stages):
        forward = [job.segments[i].forward_s or 0.0 for i in own]
        backward = [job.segments[i].backward_s or 0.0 for i in own]
        faster = costs.forward_s[stage] / (sum(forward) or 1.0)
        slower = costs.backward_s[stage] / (sum(backward) or 1.0)
        times += [
            SegmentTimes(job.segments[i].name, f * faster, b * slower)
            for i, f, b in zip(own, forward, backward, strict=True)
        ]
    schedule = study.step.schedule
    best = balance(times, costs.num_stages, schedule.num_microbatches)
    moved = replace(
        costs,
        forward_s=tuple(sum(times[i].forward_s for i in own) for own in best.stages),
        backward_s=tuple(sum(times[i].backward_s for i in own) for own in best.stages),
    )
    gain = _saved(study, simulate(schedule, moved).makespan, simulate(schedule, costs).makespan)
    return (best, gain) if gain >= WORTH else None
