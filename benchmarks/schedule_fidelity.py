"""Schedules as the engine runs them against their simulation: real ranks, computing by sleeping.

Ranks, transfers over gloo and the engine are real. A stage's computation is made to last a known
time by a sleep, so that many ranks on few cores compute beside one another. Every schedule that the
engine runs is run for some steps; the median makespan, from the engine's own trace of its actions,
stands beside the simulated one. Since sleeps end late on a busy machine, it also stands beside a
simulation with every action as long as it was. 1F1B is run with full recomputation too, as the
paper compares it with the shifted critical path. With --overhead, the cost of that trace in a job
that computes.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pickle
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tools import report
from tools.models import SIZES, build_model
from torch import nn

import merak
from merak.core.errors import ScheduleError
from merak.engine import Engine
from merak.engine.health.status import Progress
from merak.engine.health.step_records import HostClock, StepRecord
from merak.parallel import ParallelModel
from merak.schedule import (
    Schedule,
    build,
    measured_timeline,
    names,
    render_html,
    render_texts,
    simulate,
    simulated_timeline,
    stage_costs,
)
from merak.schedule.action_table import tabulate
from merak.schedule.ir import Kind, parse_action
from merak.schedule.render.svg import render_svg
from merak.schedule.serialize import to_json
from merak.schedule.simulator.simulate import Simulation
from merak.schedule.simulator.timing import time_actions

RECOMPUTING = "1f1b, recomputing"
"""1F1B with full recomputation, which the engine runs from a file."""

WIDTH = 64


class Chain(nn.Module):
    """Equal blocks, of which each becomes a segment."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.square().mean()


class Sleeping:
    """A stage whose actions last a known time: what they compute, and the rest of it asleep.

    Args:
        stage: the stage itself.
        seconds: of every kind of action, without recomputation.
        progress: knows which action the engine performs.
    """

    def __init__(self, stage: Any, seconds: dict[Kind, float], progress: Progress) -> None:
        self._stage = stage
        self._seconds = seconds
        self._progress = progress
        self._kept: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def forward(self, number: int, microbatch: Any, received: Any, keep: bool) -> Any:
        if keep:
            self._kept.add(number)
        with self.lasting():
            return self._stage.forward(number, microbatch, received, keep)

    def recompute(self, number: int, microbatch: Any) -> None:
        self._kept.add(number)
        with self.lasting():
            self._stage.recompute(number, microbatch)

    def backward(self, number: int, *others: Any, **named: Any) -> Any:
        is_kept = number in self._kept
        self._kept.discard(number)
        with self.lasting(0.0 if is_kept else self._seconds[Kind.RECOMPUTE]):
            return self._stage.backward(number, *others, **named)

    def weight_gradient(self, number: int, program: Any) -> None:
        with self.lasting():
            self._stage.weight_gradient(number, program)

    @contextmanager
    def lasting(self, more_s: float = 0.0) -> Iterator[None]:
        """Let what is inside last as long as the engine's action has to."""
        action = self._progress.status.action
        assert action is not None
        end = time.perf_counter() + self._seconds[action.kind] + more_s
        yield
        time.sleep(max(0.0, end - time.perf_counter()))


def durations(forward_s: float) -> dict[Kind, float]:
    """F = R = I = W, and B twice as long."""
    return {kind: forward_s * (2 if kind is Kind.BACKWARD else 1) for kind in Kind}


def simulated(schedule: Schedule, forward_s: float) -> Simulation:
    """The same times on paper; transfers are free."""
    num_stages = schedule.num_stages
    return simulate(schedule, stage_costs((forward_s,) * num_stages, (2 * forward_s,) * num_stages))


# ---- what a rank does ----


def rank_of_job(rank: int, job: Callable[..., Any], num_ranks: int, options: Any) -> None:
    """Start one rank, run the job, and let rank 0 write what it found."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(options.port)}
    torch.set_num_threads(1)
    merak.init(pp=num_ranks, device=getattr(options, "device", "cpu"))
    found = job(num_ranks, options)
    if rank == 0:
        Path(options.folder, "found").write_bytes(pickle.dumps(found))
    dist.barrier()


def run_schedules(num_ranks: int, options: Any) -> dict[str, Any]:
    """Steps of every schedule, or why the engine refuses it."""
    found: dict[str, Any] = {}
    for name in options.schedules:
        try:
            found[name] = run_schedule(name, num_ranks, options)
        except ScheduleError as error:
            found[name] = str(error)
    return found


def run_schedule(name: str, num_ranks: int, options: Any) -> tuple[StepRecord, ...]:
    """The measured steps of one schedule."""
    count = options.microbatches
    path = Path(options.folder, "recomputing.json")
    if name == RECOMPUTING and dist.get_rank() == 0:
        path.write_text(to_json(build("1f1b", num_ranks, count)))
    dist.barrier()
    torch.manual_seed(0)
    batch = {"x": torch.randn(count * 4, WIDTH, WIDTH)}
    steps = options.warmup + options.steps
    model = merak.parallelize(
        Chain(2 * num_ranks),
        batch,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        num_microbatches=count,
        schedule=str(path) if name == RECOMPUTING else name,
        recorded_steps=options.steps,
        hang_limit_s=60.0,
    )
    fall_asleep(model.engine, options.forward_ms / 1e3)
    for _ in range(steps):
        dist.barrier()
        model.step(batch)
    return model.engine.recorded_steps()


def fall_asleep(engine: Engine, forward_s: float) -> None:
    """Let every stage of this rank take known times, and nothing else of it change."""
    stages: dict[int, Any] = {
        number: Sleeping(stage, durations(forward_s), engine.progress)
        for number, stage in engine._state.stages.items()
    }
    engine._state = dataclasses.replace(engine._state, stages=stages)


def run_with_and_without(num_ranks: int, options: Any) -> dict[str, Any]:
    """Seconds of steps with and without a record of them, in turn, and of the record alone."""
    size = SIZES[options.size]
    shape = (size.batch * options.microbatches, size.sequence)
    tokens = torch.randint(size.vocabulary, shape, generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens}
    models = [
        merak.parallelize(
            build_model("llama", size).train(),
            batch,
            num_microbatches=options.microbatches,
            recorded_steps=kept,
        )
        for kept in (0, 4)
    ]
    seconds: list[list[float]] = [[], []]
    for number in range(options.warmup + options.steps):
        for which in (0, 1) if number % 2 else (1, 0):
            seconds[which].append(timed(models[which], batch))
    without, with_records = (taken[options.warmup :] for taken in seconds)
    steps = models[1].engine.recorded_steps()
    per_step = max(len(own) for own in steps[-1].records) * seconds_per_action()
    return {"without": without, "with": with_records, "own": per_step}


def timed(model: ParallelModel, batch: dict[str, torch.Tensor]) -> float:
    """Seconds of a step on the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    model.step(batch)
    dist.barrier()
    return time.perf_counter() - start


def seconds_per_action() -> float:
    """What the engine's hooks take for an action that waits once: told, timed and recorded."""
    progress, action, count = Progress(HostClock(), 1), parse_action("0F0"), 20000
    progress.records.open(0)
    start = time.perf_counter()
    for _ in range(count):
        with progress.action(action):
            with progress.waiting(f"the activation of microbatch {count}", (1,)):
                pass
            progress.inputs_ready()
    return (time.perf_counter() - start) / count


# ---- what is made of it ----


def spawn(job: Callable[..., Any], num_ranks: int, options: Any) -> Any:
    """Run a job on fresh ranks and give what rank 0 found."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        options.port, options.folder = listening.getsockname()[1], folder
        listening.close()
        mp.spawn(rank_of_job, args=(job, num_ranks, options), nprocs=num_ranks)
        return pickle.loads(Path(folder, "found").read_bytes())


def makespans(steps: tuple[StepRecord, ...]) -> list[float]:
    return [makespan_s(step) for step in steps]


def makespan_s(step: StepRecord) -> float:
    """From the start of the first action to the end of the last one."""
    spans = [record for own in step.records for record in own]
    return max(end for _, _, end in spans) - min(start for _, start, _ in spans)


def row(name: str, steps: tuple[StepRecord, ...], forward_s: float) -> dict[str, Any]:
    """One line of the table."""
    predicted = simulated(steps[-1].schedule, forward_s).makespan
    taken = makespans(steps)
    middle = statistics.median(taken)
    return {
        "schedule": name,
        "simulated ms": round(1e3 * predicted, 1),
        "measured ms": round(1e3 * middle, 1),
        "longer by %": round(100 * (middle / predicted - 1), 2),
        "fastest step, %": round(100 * (min(taken) / predicted - 1), 2),
        "without late sleeps, %": round(100 * statistics.median(map(own_share, steps)), 2),
    }


def own_share(step: StepRecord) -> float:
    """How much longer a step was than its simulation with every action as long as it really was.

    A sleep ends late where other work keeps the cores; what is left are transfers and the engine.
    """
    table = tabulate(step.schedule)
    lasted = [end - start for own in step.records for _, start, end in own]
    ends = time_actions(step.schedule, table, np.array(lasted)).end
    return makespan_s(step) / float(ends.max()) - 1


def ratio_row(found: dict[str, Any], other: str, forward_s: float) -> dict[str, Any]:
    """Shifted critical path ÷ another schedule, predicted and measured."""
    pair = [found["shifted_critical_path"], found[other]]
    predicted = [simulated(steps[-1].schedule, forward_s).makespan for steps in pair]
    taken = [statistics.median(makespans(steps)) for steps in pair]
    return {
        "shifted_critical_path ÷": other,
        "predicted": round(predicted[0] / predicted[1], 4),
        "measured": round(taken[0] / taken[1], 4),
        "points apart": round(100 * (taken[0] / taken[1] - predicted[0] / predicted[1]), 2),
    }


def draw(steps: tuple[StepRecord, ...], forward_s: float, path: Path | None) -> str:
    """The step of median length over its simulation; into a file if there is a path."""
    typical = sorted(steps, key=makespan_s)[len(steps) // 2]
    timelines = [
        measured_timeline(typical.schedule, typical.records),
        simulated_timeline(simulated(typical.schedule, forward_s)),
    ]
    if path is not None:
        render = render_html if path.suffix == ".html" else render_svg
        path.write_text(render(timelines), encoding="utf-8")
    return render_texts(timelines, num_columns=160)


def fidelity(options: Any) -> dict[str, list[dict[str, Any]]]:
    """Tables of every size, and the picture of the first."""
    forward_s = options.forward_ms / 1e3
    tables: dict[str, list[dict[str, Any]]] = {}
    for number, size in enumerate(options.sizes):
        num_ranks, options.microbatches = (int(part) for part in size.split("x"))
        found = spawn(run_schedules, num_ranks, options)
        ran = {name: steps for name, steps in found.items() if not isinstance(steps, str)}
        title = f"P = {num_ranks}, M = {options.microbatches}, F = {options.forward_ms:g} ms"
        tables[title] = [row(name, steps, forward_s) for name, steps in ran.items()]
        pairs = [other for other in ("1f1b", RECOMPUTING) if other in ran]
        if "shifted_critical_path" in ran and pairs:
            tables[f"{title}: ratios"] = [ratio_row(ran, other, forward_s) for other in pairs]
        refused = [{"schedule": n, "refused": s} for n, s in found.items() if isinstance(s, str)]
        if refused:
            tables[f"{title}: not run"] = refused
        if number == 0 and options.draw in ran:
            drawn = draw(ran[options.draw], forward_s, options.picture)
            if not options.json:
                print(drawn + "\n")
    return tables


def overhead(options: Any) -> dict[str, list[dict[str, Any]]]:
    """What the record costs of a step that computes."""
    options.microbatches = 8
    found = spawn(run_with_and_without, 2, options)
    without = statistics.median(found["without"])
    line = {
        "step ms without records": 1e3 * without,
        "with records": 1e3 * statistics.median(found["with"]),
        "ratio of medians": statistics.median(found["with"]) / without,
        "ratio of fastest": min(found["with"]) / min(found["without"]),
        "all hooks alone, % of a step": 100 * found["own"] / without,
    }
    return {f"Recording, llama {options.size}, pp=2, 8 microbatches": [line]}


def parse() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--sizes", nargs="+", default=["4x8", "8x16"], help="ranks × microbatches")
    parser.add_argument("--schedules", nargs="+", default=[*names(), RECOMPUTING])
    parser.add_argument("--forward-ms", type=float, default=50.0, help="that a forward lasts")
    parser.add_argument("--steps", type=int, default=5, help="steps that are measured")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them")
    parser.add_argument("--draw", default="shifted_critical_path", help="schedule to draw")
    parser.add_argument("--picture", type=Path, help=".svg or .html file to draw it into")
    parser.add_argument("--overhead", action="store_true", help="measure the cost of recording")
    parser.add_argument("--size", choices=sorted(SIZES), default="small", help="of that model")
    return parser.parse_args()


def main() -> None:
    options = parse()
    report.show(overhead(options) if options.overhead else fidelity(options), options.json)


if __name__ == "__main__":
    main()
