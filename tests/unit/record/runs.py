"""Records of runs that never were: steps as the simulator has them, and jobs to go with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from merak.record.run import (
    JobRecord,
    LogRecord,
    MeasuredStep,
    RankRecord,
    RunRecord,
    SegmentRecord,
)
from merak.schedule.costs import Costs, stage_costs
from merak.schedule.ir import Schedule
from merak.schedule.registry import build
from merak.schedule.simulator.simulate import simulate

GB = 10**9

BEGIN_S = 1000.0
"""Beginning of the steps on their clock."""


def step_of(
    schedule: Schedule, costs: Costs, number: int = 10, ahead_s: float = 0.0
) -> MeasuredStep:
    """A step that took exactly what the simulator says, ahead_s after its ranks began it."""
    simulation = simulate(schedule, costs)
    begin = BEGIN_S + number
    rows = []
    for rank, actions in enumerate(schedule.actions):
        first = simulation.table.starts[rank]
        rows.append(
            tuple(
                (
                    action,
                    begin + ahead_s + float(simulation.start[first + place]),
                    begin + ahead_s + float(simulation.end[first + place]),
                )
                for place, action in enumerate(actions)
            )
        )
    end = begin + ahead_s + simulation.makespan
    return MeasuredStep(number, schedule, tuple(rows), ((begin, end),) * schedule.num_ranks)


def job_of(
    schedule: Schedule,
    sizes: tuple[int, ...],
    seconds: Callable[[int], float] = lambda index: 0.01,
    **others: object,
) -> JobRecord:
    """A job with segments of some expected seconds (twice as many backward)."""
    starts = [sum(sizes[:stage]) for stage in range(len(sizes))]
    segments = tuple(
        SegmentRecord(f"layers.{i // 2}.{('attn', 'mlp')[i % 2]}", 1000, seconds(i), 2 * seconds(i))
        for i in range(sum(sizes))
    )
    job = JobRecord(
        model="Model",
        parameters=1000 * len(segments),
        degrees={"dp": 2, "tp": 1, "pp": schedule.num_ranks, "cp": 1, "ep": 1},
        device="NVIDIA H100",
        on_gpu=True,
        device_bytes=80_000_000_000,
        hosts=(),
        microbatch=(4, 128),
        schedule=schedule,
        stages=tuple(
            tuple(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)
        ),
        segments=segments,
        memory=tuple(
            RankRecord(
                50_000_000_000, 10_000_000_000, 10_000_000_000, 20_000_000_000, 9_000_000_000
            )
            for _ in range(schedule.num_ranks)
        ),
        recompute_s=(0.0,) * len(sizes),
        flops=1e12,
        peak_flops_per_s=989e12,
        peak_source="bfloat16, data sheet of h100",
        options={"zero": "1"},
        versions={"torch": "2.13.0"},
    )
    return replace(job, **others)  # type: ignore[arg-type]


def log_of(step: int, pp: int = 2, **figures: float) -> LogRecord:
    """A log with the memory of every pp rank."""
    return LogRecord(step, 1.8e9 + step, {"loss": 6.0 / step, **figures}, (48_000_000_000,) * pp)


def small_run() -> RunRecord:
    """A run of two pp ranks, whose second stage is 1.5 times as long as the first."""
    schedule = build("1f1b", 2, 4)
    costs = stage_costs((0.02, 0.03), (0.04, 0.06))
    steps = tuple(step_of(schedule, costs, number) for number in (10, 11, 12))
    logs = tuple(
        log_of(step, tokens_per_second=1e4 + step, step_seconds=0.5, mfu=0.41, bubble=0.3)
        for step in (10, 20, 30)
    )
    return RunRecord(job_of(schedule, (3, 3)), logs, steps)
