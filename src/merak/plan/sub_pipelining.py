"""The decision on sub-pipelined tensor parallelism: the user's option, or where it pays."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from merak.core.errors import PlanError
from merak.core.mesh import Mesh, crosses_hosts
from merak.core.rank0 import decide_on_rank0
from merak.graph.ir.ir import batch_size
from merak.ops.collectives import start_all_reduce
from merak.plan.balance import Timed
from merak.plan.cost.overlap import Layers, layer_costs
from merak.plan.engine_options import EngineOptions
from merak.plan.layout import Layout
from merak.schedule.ir import Schedule
from merak.schedule.simulator.simulate import simulate

logger = logging.getLogger(__name__)

LEAST_GAIN = 1.05
"""Least estimated speed-up that "auto" accepts; less is within the estimate's error."""

_REPEATS = 5
_SIZE = 512
"""Rows and columns of the matrices that are multiplied beside an all-reduce."""
_MOST_PRODUCTS = 1000


@dataclass(frozen=True, slots=True)
class AllReduceTimes:
    """Measured time of an all-reduce over tp.

    Args:
        seconds: of one all-reduce by itself.
        hidden: fraction of the shorter of all-reduce and computation that runs beside the other.
    """

    seconds: float
    hidden: float


def requested_sub_pipelining(options: EngineOptions) -> str:
    """The option `sub_pipelining`; "off" with sequence parallelism.

    Raises:
        PlanError: both are requested.
    """
    if not options.sequence_parallel:
        return options.sub_pipelining
    if options.sub_pipelining == "on":
        raise PlanError(
            "sub_pipelining='on' hides all-reduces, of which sequence_parallel=True leaves none "
            "between blocks; use one of the two: sub-pipelining where the link is slow, sequence "
            "parallelism where memory is short."
        )
    return "off"


def choose_sub_pipelining(
    requested: str, layout: Layout, mesh: Mesh, times: Callable[[], Sequence[Timed]]
) -> bool:
    """Decide whether microbatches run as two sub-microbatches; collective, the same everywhere.

    Args:
        requested: "on", "off", or "auto" for where the simulated schedule is shorter, with measured
            all-reduces over tp. On one machine without GPUs "auto" is off: there an all-reduce is
            a copy by the cores that compute.
        layout: of the job.
        mesh: the grid of ranks.
        times: function that returns the times of all segments for a whole microbatch on one rank.
    """
    if mesh.tp == 1 or requested == "off":
        return False
    if requested == "on":
        return True
    if batch_size(layout.graph) < 2:
        return False
    if mesh.device.type == "cpu" and not crosses_hosts(mesh, "tp"):
        return False
    measured = measure_all_reduce(layout, mesh)

    def is_faster() -> bool:
        stages = tensor_parallel_stages(layout, times(), mesh.tp, measured.seconds)
        gain = sub_pipelining_gain(layout.schedule, stages, measured.hidden)
        logger.info(
            "an all-reduce over tp takes %.2g s, of which computation hides %.0f %%: with "
            "sub-microbatches a step is %.2f times as fast by the simulation, so sub-pipelining "
            "is %s",
            measured.seconds,
            100 * measured.hidden,
            gain,
            "on" if gain >= LEAST_GAIN else "off",
        )
        return gain >= LEAST_GAIN

    # Measured times differ from rank to rank, and all need one answer.
    return decide_on_rank0(mesh, "the choice of sub-pipelining", is_faster)


def tensor_parallel_stages(
    layout: Layout, times: Sequence[Timed], tp: int, all_reduce_s: float
) -> tuple[Layers, ...]:
    """Stages of a job as equal tensor parallel layers, one for each segment.

    Args:
        layout: the segments of every stage.
        times: of every segment, for a whole microbatch on one rank.
        tp: tensor parallel degree.
        all_reduce_s: seconds of one all-reduce.
    """
    stages = []
    for own in layout.partition.stages:
        forward_s = statistics.mean(times[i].forward_s for i in own) / tp
        backward_s = statistics.mean(times[i].backward_s for i in own) / tp
        stages.append(Layers(len(own), forward_s, all_reduce_s, backward_s))
    return tuple(stages)


def sub_pipelining_gain(schedule: Schedule, stages: Sequence[Layers], hidden: float) -> float:
    """Simulated speed-up of an iteration by sub-pipelining.

    Args:
        schedule: of the job.
        stages: their layers.
        hidden: fraction of the shorter of all-reduce and computation that runs beside the other.
    """
    whole_s, split_s = (
        simulate(schedule, layer_costs(stages, split)).makespan for split in (False, True)
    )
    expected_s = whole_s - hidden * (whole_s - split_s)
    return whole_s / expected_s if expected_s else 1.0


def measure_all_reduce(layout: Layout, mesh: Mesh) -> AllReduceTimes:
    """Measure an all-reduce over tp of the largest value between two segments; collective.

    Args:
        layout: of the job, for the model at its planned shape.
        mesh: the grid of ranks.
    """
    graph = layout.graph
    crossing = [graph.values[name] for cut in graph.boundaries() for name in cut]
    largest = max(crossing, key=lambda meta: meta.num_bytes, default=None)
    if largest is None:
        return AllReduceTimes(0.0, 0.0)
    tensor = torch.zeros(largest.shape, dtype=largest.dtype, device=mesh.device)
    factor = torch.zeros(_SIZE, _SIZE, device=mesh.device)

    def start() -> Callable[[], object]:
        work = start_all_reduce(tensor, "tp")
        return work.wait if work is not None else lambda: None

    def compute(num_products: int) -> None:
        for _ in range(num_products):
            torch.mm(factor, factor)

    def both() -> None:
        wait = start()
        compute(num_products)
        wait()

    all_reduce_s = _seconds(lambda: start()(), mesh.device)
    product_s = _seconds(lambda: compute(1), mesh.device)
    num_products = min(max(round(all_reduce_s / product_s), 1), _MOST_PRODUCTS)
    compute_s = _seconds(lambda: compute(num_products), mesh.device)
    both_s = _seconds(both, mesh.device)
    hidden = (all_reduce_s + compute_s - both_s) / min(all_reduce_s, compute_s)
    return AllReduceTimes(all_reduce_s, min(max(hidden, 0.0), 1.0))


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Median seconds of several runs, after one that does not count."""
    found = []
    for _ in range(1 + _REPEATS):
        _synchronize(device)
        begin = time.perf_counter()
        run()
        _synchronize(device)
        found.append(time.perf_counter() - begin)
    return statistics.median(found[1:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
