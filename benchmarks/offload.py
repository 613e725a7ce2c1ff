"""Step time where activations are kept, wait in host memory, or are computed again.

Pipeline stages run in the engine over gloo. Segments are made to last by sleeping, so that ranks do
not share cores. Copies to host memory are real ones behind a limit of their rate: each direction is
a thread that makes a copy and takes the time of its bytes for it, as a link of that rate would
beside a device that computes. Rates are said as a share of the one at which a segment's activations
leave while another one's forward runs. "in turn" makes the same copies with nothing beside them:
what "offload" is shorter was hidden. "auto" has half the memory between the two.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from recompute_engine import Chain, Job, foresee, sgd, slow_down
from schedule_fidelity import spawn
from tools import report

from merak.core.mesh import current_mesh
from merak.data import signature
from merak.data.microbatches import split_batch
from merak.engine import Engine, GraphSource, build_engine
from merak.engine.segments.copy_streams import Pair
from merak.parallel import ParallelModel
from merak.plan import EngineOptions, SegmentTimes, load_times, save_times
from merak.plan.activation_policy import ActivationPolicy
from merak.plan.activations.fit import simulated

NUM_STAGES, BLOCKS_PER_STAGE = 4, 4


class Link:
    """One direction of a link of some rate, beside the computation or in its way.

    Args:
        bytes_per_s: its rate.
        is_beside: whether copies run while others compute.
    """

    def __init__(self, bytes_per_s: float, is_beside: bool) -> None:
        self._bytes_per_s = bytes_per_s
        self._is_beside = is_beside
        self._free_s = 0.0
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._jobs.get()()

    def copy(
        self, pairs: Sequence[Pair], after: Sequence[Any] = (), is_ahead: bool = False
    ) -> threading.Event:
        """Begin copies; the link takes their time, and that of those before."""
        done, asked = threading.Event(), time.perf_counter()

        def job() -> None:
            for mark in after:
                mark.wait()
            size = sum(source.nbytes for _, source in pairs)
            # By the clock: a thread that wakes up late does not make the link slower.
            ready = max((mark.at for mark in after), default=0.0)
            self._free_s = max(self._free_s, asked, ready) + size / self._bytes_per_s
            for target, source in pairs:
                target.copy_(source)
            time.sleep(max(0.0, self._free_s - time.perf_counter()))
            done.at = self._free_s  # type: ignore[attr-defined]
            done.set()

        self._jobs.put(job)
        if not self._is_beside:
            done.wait()
        return done

    def wait(self, mark: threading.Event) -> None:
        """Wait for copies."""
        mark.wait()

    def drain(self) -> None:
        """Wait for all of them."""
        self.copy([]).wait()

    def finish(self, mark: threading.Event | None = None) -> None:
        """Wait for copies; without a mark, for all."""
        (self.copy([]) if mark is None else mark).wait()


def put_between(engine: Engine, bytes_per_s: float, is_beside: bool) -> None:
    """Let this rank's copies go over a link of some rate."""
    for offload in {s.offload for s in engine._state.stages.values() if s.offload is not None}:
        offload._out, offload._back = (Link(bytes_per_s, is_beside) for _ in range(2))


# ---- what a rank does ----


def job_of(options: Any) -> Job:
    """A chain of equal segments; every rank writes the times down that they will last."""
    draws = torch.Generator().manual_seed(1)
    batch = {"x": torch.randn(options.microbatches * options.rows, 64, 64, generator=draws)}
    folder = Path(options.folder)
    layout = {"partition": (BLOCKS_PER_STAGE,) * NUM_STAGES}
    job = Job(Chain, batch, layout, options.forward_ms / 1e3, folder)
    path = folder / "times.json"
    segments = foresee(job, options.microbatches).layout.graph.segments
    seconds = options.forward_ms / 1e3
    if dist.get_rank() == 0:
        save_times(path, [SegmentTimes(s.name, seconds, 2 * seconds) for s in segments])
    dist.barrier()
    return Job(Chain, batch, {**layout, "segment_times": path}, job.forward_s, folder)


def run_choices(num_ranks: int, options: Any) -> list[dict[str, Any]]:
    """Every choice in turn."""
    job = job_of(options)
    whole = foresee(job, options.microbatches)
    size = median(whole.offload_bytes().values())
    even = size / (options.forward_ms / 1e3)
    schedule = whole.layout.schedule
    peaks = [
        max(
            rank.peak.total_bytes
            for rank in whole.ranks(schedule, ActivationPolicy(whole.saved, offloaded=offloaded))
        )
        for offloaded in (frozenset[int](), whole.saved)
    ]
    budget = (peaks[0] + peaks[1]) // 2
    rows = [measure("keep all", job, options, 0.0, recompute="off")]
    rows.append(measure("recompute", job, options, 0.0, recompute="full"))
    for share in options.rates:
        rate = share * even
        away = {"recompute": "off", "offload_activations": "full", "host_bytes_per_s": rate}
        rows.append(measure("offload", job, options, share, **away))
        rows.append(measure("offload, in turn", job, options, share, is_beside=False, **away))
        auto = {"recompute": "auto", "offload_activations": "auto", "memory_budget": budget}
        rows.append(measure("auto", job, options, share, host_bytes_per_s=rate, **auto))
    auto = {"recompute": "auto", "memory_budget": budget}
    rows.append(measure("auto, recompute alone", job, options, 0.0, **auto))
    return rows


def measure(
    name: str, job: Job, options: Any, share: float, is_beside: bool = True, **choice: Any
) -> dict[str, Any]:
    """Seconds of steps, beside those that the simulation says."""
    count = options.microbatches
    forecast = foresee(job, count, **choice)
    source = GraphSource(Chain(), cache_dir=job.folder)
    columns = signature(split_batch(job.batch, count)[0]).columns
    engine = build_engine(
        source,
        columns,
        current_mesh(),
        EngineOptions(num_microbatches=count, optimizer=sgd, **job.options, **choice),
    )
    parallel = ParallelModel(source.model, engine, count, sgd, None)
    assert job.forward_s is not None
    slow_down(forecast, job.forward_s)
    rate = choice.get("host_bytes_per_s", float("inf"))
    put_between(engine, rate, is_beside)
    seconds = []
    for _ in range(1 + options.steps):
        dist.barrier()
        start = time.perf_counter()
        parallel.step(job.batch)
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    layout = forecast.layout
    names = [segment.name for segment in layout.graph.segments]
    times = forecast.timed(load_times(job.options["segment_times"], names), None)
    ranks = forecast.ranks(layout.schedule)
    return {
        "name": name,
        "share": share,
        "seconds": seconds[1:],
        "simulated": simulated(forecast, forecast.policy, times, rate).iteration_s
        if is_beside
        else None,
        "recompute": len(names) - len(forecast.saved),
        "host": len(layout.activations.offloaded),
        "peak": max(rank.peak.total_bytes for rank in ranks),
        "host_bytes": max(rank.host.total for rank in ranks),
    }


# ---- what is made of it ----


def table(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Step times beside that of keeping all."""
    kept = median(rows[0]["seconds"])
    return [
        {
            "activations": row["name"],
            "rate": row["share"] or "",
            "recompute": row["recompute"],
            "in host memory": row["host"],
            "step ms": round(1e3 * median(row["seconds"]), 1),
            "spread %": round(
                100 * (max(row["seconds"]) - min(row["seconds"])) / median(row["seconds"]), 1
            ),
            "over keep all": round(median(row["seconds"]) / kept, 3),
            "simulated": round(row["simulated"] / rows[0]["simulated"], 3)
            if row["simulated"]
            else "",
            "device, kB": round(row["peak"] / 1e3),
            "host, kB": round(row["host_bytes"] / 1e3),
        }
        for row in rows
    ]


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rows", type=int, default=4, help="samples of a microbatch")
    parser.add_argument("--steps", type=int, default=3, help="measured, after one that is not")
    parser.add_argument("--forward-ms", type=float, default=20.0, help="of a segment")
    parser.add_argument("--rates", type=float, nargs="+", default=[2.0, 1.0, 0.5])
    args = parser.parse_args()
    report.show({"sleeping segments": table(spawn(run_choices, NUM_STAGES, args))}, args.json)


if __name__ == "__main__":
    main()
