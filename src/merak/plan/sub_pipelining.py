"""Whether a job's microbatches run in halves: as the user says, or where it pays."""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from merak.core.errors import PlanError
from merak.core.health.status import waiting_for_first
from merak.core.mesh import Mesh, crosses_nodes
from merak.graph.ir.ir import batch_size
from merak.ops.collectives import start_all_reduce
from merak.plan.balance import Timed
from merak.plan.cost.overlap import Layers, layer_costs
from merak.plan.layout import EngineOptions, Layout
from merak.schedule.ir import Schedule
from merak.schedule.simulate.simulate import simulate

logger = logging.getLogger(__name__)

CHOICES = ("auto", "on", "off")
LEAST_GAIN = 1.05
"""How many times as fast it must be by the estimate: less is within the estimate's error."""

_REPEATS = 5
_SIZE = 512
"""Rows and columns of the matrices that are multiplied to see what runs beside a sum."""
_MOST_PRODUCTS = 1000


@dataclass(frozen=True, slots=True)
class Sums:
    """The all-reduces of a job as measured.

    Args:
        seconds: one of them by itself.
        hidden: what part of the shorter of a sum and a computation disappears beside the other.
    """

    seconds: float
    hidden: float


def wish_for_halves(options: EngineOptions) -> str:
    """Whether microbatches are to run in halves: with sequence parallelism they never do.

    Raises:
        PlanError: both are asked for.
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


def choose_halves(
    wish: str, layout: Layout, mesh: Mesh, times: Callable[[], Sequence[Timed]]
) -> bool:
    """Whether microbatches run in halves; called alike on all ranks, and the same on all.

    Args:
        wish: "on", "off", or "auto" for where the job's schedule, simulated both ways, says that it
            pays, with sums over tp as measured. Between the ranks of one machine without GPUs they
            are copies that the cores make which compute, and nothing is measured.
        layout: the job.
        mesh: the grid of ranks.
        times: gives the seconds of every segment for a whole microbatch on one rank.

    Raises:
        PlanError: another wish.
    """
    if wish not in CHOICES:
        raise PlanError(f"sub_pipelining={wish!r} is none of {', '.join(map(repr, CHOICES))}.")
    if mesh.tp == 1 or wish == "off":
        return False
    if wish == "on":
        return True
    # Nodes may have different numbers of ranks: rank 0 says whether all of them measure.
    measured = [batch_size(layout.graph) >= 2 and _is_worth_measuring(mesh)]
    with waiting_for_first("whether to measure"):
        dist.broadcast_object_list(measured, src=0)
    if not measured[0]:
        return False
    sums = measure_sums(layout, mesh)
    # Measured times differ from rank to rank, and all need one answer: rank 0 decides.
    decided = [False]
    if mesh.rank == 0:
        stages = tensor_parallel_stages(layout, times(), mesh.tp, sums.seconds)
        gain = gain_of_halves(layout.schedule, stages, sums.hidden)
        decided = [gain >= LEAST_GAIN]
        logger.info(
            "a sum over tp takes %.2g s, of which %.0f %% disappear beside computation: in halves "
            "a step is %.2f times as fast by the simulation, so microbatches run %s",
            sums.seconds,
            100 * sums.hidden,
            gain,
            "in halves" if decided[0] else "whole",
        )
    with waiting_for_first("what was measured"):
        dist.broadcast_object_list(decided, src=0)
    return decided[0]


def _is_worth_measuring(mesh: Mesh) -> bool:
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", mesh.world_size))
    return mesh.device.type != "cpu" or crosses_nodes(mesh, per_node)


def tensor_parallel_stages(
    layout: Layout, times: Sequence[Timed], tp: int, sum_s: float
) -> tuple[Layers, ...]:
    """The stages of a job as equal layers, one for each segment.

    Args:
        layout: which segments form which stage.
        times: of every segment, for a whole microbatch on one rank.
        tp: the ranks that share the work.
        sum_s: seconds of one all-reduce.
    """
    stages = []
    for own in layout.partition.stages:
        forward_s = statistics.mean(times[i].forward_s for i in own) / tp
        backward_s = statistics.mean(times[i].backward_s for i in own) / tp
        stages.append(Layers(len(own), forward_s, sum_s, backward_s))
    return tuple(stages)


def gain_of_halves(schedule: Schedule, stages: Sequence[Layers], hidden: float) -> float:
    """How many times as fast an iteration is in halves, by the simulation.

    Args:
        schedule: of the job.
        stages: their layers.
        hidden: what part of the shorter of a sum and a computation disappears beside the other.
    """
    whole_s, halves_s = (
        simulate(schedule, layer_costs(stages, in_halves)).makespan for in_halves in (False, True)
    )
    expected_s = whole_s - hidden * (whole_s - halves_s)
    return whole_s / expected_s if expected_s else 1.0


def measure_sums(layout: Layout, mesh: Mesh) -> Sums:
    """Measure an all-reduce over tp of what crosses a cut of the model; called alike on all ranks.

    Args:
        layout: of which the model at the shape it is planned with matters.
        mesh: the grid of ranks.
    """
    graph = layout.graph
    crossing = [graph.values[name] for cut in graph.boundaries() for name in cut]
    largest = max(crossing, key=lambda meta: meta.num_bytes, default=None)
    if largest is None:
        return Sums(0.0, 0.0)
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

    sum_s = _seconds(lambda: start()(), mesh.device)
    product_s = _seconds(lambda: compute(1), mesh.device)
    num_products = min(max(round(sum_s / product_s), 1), _MOST_PRODUCTS)
    compute_s = _seconds(lambda: compute(num_products), mesh.device)
    both_s = _seconds(both, mesh.device)
    saved = (sum_s + compute_s - both_s) / min(sum_s, compute_s)
    return Sums(sum_s, min(max(saved, 0.0), 1.0))


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Median of several runs, after one that does not count."""
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
