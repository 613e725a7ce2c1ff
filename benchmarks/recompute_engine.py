"""Step time with no, full and stage-aware recomputation in the engine, at equal memory budgets.

Four pipeline stages run over gloo, first with computation that is made to last by sleeping, so that
the ranks do not share cores, then with real computation of a GPT-2. A budget lies between what a
job needs that recomputes everything and one that keeps everything, which does not fit it and stands
there for comparison. "formula" keeps the same share of every stage's bytes, as the paper does, with
the largest α_1 that fits; "auto" is Merak's choice. Gains are of medians, and of the fastest steps
of each, which a busy machine disturbs less. Every rank's peak, counted by storages in one
more step, stands beside the estimate.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from schedule_fidelity import spawn
from tools import report
from tools.lasting import Seconds, make_last
from tools.models import SIZES, build_model
from tools.plans import first_of_stages, paper_ratios
from torch import nn

from merak.core.mesh import current_mesh
from merak.core.storages import Storages
from merak.data import signature
from merak.data.microbatches import split_batch
from merak.engine import GraphSource, build_engine, forecast_of
from merak.graph.joint.segment import JointSegment
from merak.parallel import ParallelModel
from merak.plan import EngineOptions, Forecast, SegmentTimes, save_times
from merak.plan.activation_policy import ActivationPolicy
from merak.plan.layout import speeds
from merak.plan.memory.ledger import Category

NUM_STAGES, BLOCKS_PER_STAGE = 4, 4
STATIC = (Category.PARAMETERS, Category.OPTIMIZER, Category.BUFFERS)

Batch = Mapping[str, torch.Tensor]


class Chain(nn.Module):
    """Blocks whose activations are large beside their weights; each becomes a segment."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Linear(width, width) for _ in range(NUM_STAGES * BLOCKS_PER_STAGE)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.square().mean()


def slow_down(forecast: Forecast, forward_s: float) -> None:
    """Let every segment of this rank compute for a known time, less what it keeps saves it."""
    same = [SegmentTimes("", 1.0, 2.0)] * len(forecast.layout.graph.segments)
    times = forecast.timed(same, speeds(forecast.options, forecast.mesh, None))
    again = {forecast.recompute_s(times, i, o) for i, o in forecast.policy.selective.items()}
    kept_s = forward_s * max(again, default=1.0)  # of blocks that are equal

    def seconds(segment: JointSegment) -> Seconds:
        return Seconds(forward_s, kept_s if segment.kept else forward_s, 2 * forward_s)

    make_last(seconds)


# ---- what a rank does ----


@dataclasses.dataclass(frozen=True)
class Job:
    """A model, its batch, and how long its segments last."""

    model: Callable[[], nn.Module]
    batch: Batch
    options: dict[str, Any]
    forward_s: float | None
    folder: Path

    def source(self) -> GraphSource:
        """The model anew; speeds of the machine are measured once for all choices."""
        return GraphSource(self.model(), cache_dir=self.folder)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


def job_of(kind: str, options: Any) -> Job:
    """The job that sleeps, or the one that computes."""
    draws = torch.Generator().manual_seed(1)
    count = options.microbatches
    if kind == "sleeping":
        return Job(
            Chain,
            {"x": torch.randn(count * 4, 64, 64, generator=draws)},
            {
                "segment_times": Path(options.folder, "times.json"),
                "partition": (BLOCKS_PER_STAGE,) * NUM_STAGES,
            },
            options.forward_ms / 1e3,
            Path(options.folder),
        )
    size = SIZES[options.size]
    shape = (size.batch * count, size.sequence)
    tokens = torch.randint(size.vocabulary, shape, generator=draws)
    batch = {"input_ids": tokens, "labels": tokens}
    return Job(lambda: build_model("gpt2", size).train(), batch, {}, None, Path(options.folder))


def foresee(job: Job, count: int, **choice: Any) -> Forecast:
    """The memory of a job."""
    sample = signature(split_batch(job.batch, count)[0]).columns
    options = EngineOptions(num_microbatches=count, optimizer=sgd, **job.options, **choice)
    return forecast_of(job.source(), sample, current_mesh(), options)


def run_job(num_ranks: int, options: Any) -> list[dict[str, Any]]:
    """Every choice of what recomputes, in turn."""
    count = options.microbatches
    job = job_of(options.kind, options)
    if job.forward_s is not None:
        plain = dataclasses.replace(job, options={"partition": job.options["partition"]})
        segments = foresee(plain, count).layout.graph.segments
        times = [SegmentTimes(s.name, job.forward_s, 2 * job.forward_s) for s in segments]
        if dist.get_rank() == 0:
            save_times(job.options["segment_times"], times)
        dist.barrier()
    whole = foresee(job, count)
    schedule = whole.layout.schedule
    least, most = (
        max(rank.peak.total_bytes for rank in whole.ranks(schedule, ActivationPolicy(saved)))
        for saved in (frozenset[int](), whole.saved)
    )
    rows = [measure("none", job, options, recompute="off")]
    rows.append(measure("full", job, options, recompute="full"))
    rows.append(measure("selective", job, options, recompute="selective"))
    for share in options.budgets:
        budget = least + int(share * (most - least))
        kept = formula(whole, budget)
        listed = sorted(set(range(len(whole.layout.graph.segments))) - kept)
        rows.append(measure(f"formula in {share}", job, options, recompute=listed))
        choice = {"recompute": "auto", "memory_budget": budget}
        rows.append(measure(f"auto in {share}", job, options, **choice) | {"budget": budget})
    return rows


def formula(forecast: Forecast, budget: int) -> frozenset[int]:
    """What the paper's formula keeps with the largest α_1, in hundredths, that fits."""
    best = frozenset[int]()
    partition, schedule = forecast.layout.partition, forecast.layout.schedule
    for hundredths in range(0, 101):
        kept = first_of_stages(partition, paper_ratios(hundredths / 100, partition.num_stages))
        ranks = forecast.ranks(schedule, ActivationPolicy(kept))
        if max(rank.peak.total_bytes for rank in ranks) <= budget:
            best = kept
    return best


def measure(name: str, job: Job, options: Any, **choice: Any) -> dict[str, Any]:
    """Seconds of steps, and every rank's peak beside its estimate."""
    count = options.microbatches
    forecast = foresee(job, count, **choice)
    source = job.source()
    engine = build_engine(
        source,
        signature(split_batch(job.batch, count)[0]).columns,
        current_mesh(),
        EngineOptions(num_microbatches=count, optimizer=sgd, **job.options, **choice),
    )
    parallel = ParallelModel(source.model, engine, count, sgd, None)
    seconds = []
    bytes_counted = counted_step(parallel, job.batch)
    if job.forward_s is not None:
        slow_down(forecast, job.forward_s)
    for _ in range(1 + options.steps):
        dist.barrier()
        start = time.perf_counter()
        parallel.step(job.batch)
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    peak = forecast.ranks(forecast.layout.schedule)[dist.get_rank()].peak
    static = sum(peak.by_category.get(category, 0) for category in STATIC)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (peak.total_bytes - static, bytes_counted, static))
    return {
        "name": name,
        "seconds": seconds[1:],
        "bytes": found,
        "saved": len(forecast.saved),
        "selective": len(forecast.policy.selective),
        "segments": len(forecast.layout.graph.segments),
    }


def counted_step(parallel: Any, batch: Batch) -> int:
    """The most bytes alive in a step beside parameters, buffers and the optimizer's state."""
    parallel.step(batch)
    engine = parallel.engine
    known = [*engine.parameters.values(), *parallel.model.buffers()]
    known += engine._state.base.constants.values()
    with Storages([*known, *batch.values()]) as storages:
        parallel.step(batch)
    own = engine._state.base.columns
    # The batch is there before the step; the estimate counts the columns that a rank reads.
    return storages.peak_bytes + sum(column.nbytes for n, column in batch.items() if n in own)


# ---- what is made of it ----


def table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Step times beside those of full recomputation, and estimates beside measured bytes."""
    full = next(row["seconds"] for row in rows if row["name"] == "full")
    lines = []
    for row in rows:
        errors = [100 * (e / m - 1) for e, m, _ in row["bytes"]]
        middle = statistics.median(row["seconds"])
        lines.append(
            {
                "recompute": row["name"],
                "saved whole": f"{row['saved']} of {row['segments']}",
                "in part": row["selective"],
                "step ms": round(1e3 * middle, 1),
                "spread %": round(100 * (max(row["seconds"]) - min(row["seconds"])) / middle, 1),
                "gain over full": round(statistics.median(full) / middle, 3),
                "of fastest steps": round(min(full) / min(row["seconds"]), 3),
                "largest rank, kB": round(max(m + s for _, m, s in row["bytes"]) / 1e3),
                "budget, kB": round(row["budget"] / 1e3) if "budget" in row else "",
                "estimate off by %": f"{min(errors):+.1f} to {max(errors):+.1f}",
            }
        )
    return lines


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--microbatches", type=int, default=12)
    parser.add_argument("--steps", type=int, default=5, help="measured, after one that is not")
    parser.add_argument("--forward-ms", type=float, default=5.0, help="of a sleeping segment")
    parser.add_argument("--size", choices=sorted(SIZES), default="medium")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.25, 0.5, 0.75])
    parser.add_argument("--kinds", nargs="+", default=["sleeping", "computing"])
    args = parser.parse_args()
    tables = {}
    for kind in args.kinds:
        args.kind = kind
        tables[f"{kind}, load {os.getloadavg()[0]:.1f}"] = table(spawn(run_job, NUM_STAGES, args))
    report.show(tables, args.json)


if __name__ == "__main__":
    main()
