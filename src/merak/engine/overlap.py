"""Whether a job's microbatches run in halves: as the user says, or where it pays."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from merak.core.collectives import start_sum
from merak.core.errors import PlanError
from merak.core.mesh import Mesh
from merak.graph.ir import ModelGraph
from merak.plan.balance import Timed
from merak.plan.overlap import Layers

logger = logging.getLogger(__name__)

CHOICES = ("auto", "on", "off")
LEAST_GAIN = 1.05
"""How many times as fast it must be by the estimate: less is within the estimate's error."""

_REPEATS = 5


def choose_halves(
    wish: str, graph: ModelGraph, mesh: Mesh, times: Callable[[], Sequence[Timed]]
) -> bool:
    """Whether microbatches run in halves; called alike on all ranks, and the same on all.

    Args:
        wish: "on", "off", or "auto" for where the estimate says that it pays: on a GPU, with the
            measured time of an all-reduce. On the CPU all-reduces take the cores that compute.
        graph: the model at the shape it is planned with.
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
    if mesh.device.type == "cpu":
        return False
    layers = Layers(
        num_layers=len(graph.segments),
        compute_s=statistics.mean(segment.forward_s for segment in times()) / mesh.tp,
        communication_s=_seconds_of_sum(graph, mesh),
    )
    # Measured times differ from rank to rank, and all need one answer: rank 0 decides.
    decided = [layers.gain() >= LEAST_GAIN]
    dist.broadcast_object_list(decided, src=0)
    if mesh.rank == 0:
        logger.info(
            "a segment computes for %.2g s and sums over tp for %.2g s: in halves %.2f times as "
            "fast, so microbatches run %s",
            layers.compute_s,
            layers.communication_s,
            layers.gain(),
            "in halves" if decided[0] else "whole",
        )
    return decided[0]


def _seconds_of_sum(graph: ModelGraph, mesh: Mesh) -> float:
    """One all-reduce over tp of what crosses a cut of the model."""
    crossing = [graph.values[name] for cut in graph.boundaries() for name in cut]
    largest = max(crossing, key=lambda meta: meta.num_bytes, default=None)
    if largest is None:
        return 0.0
    tensor = torch.zeros(largest.shape, dtype=largest.dtype, device=mesh.device)
    found = []
    for _ in range(1 + _REPEATS):
        torch.cuda.synchronize(mesh.device)
        begin = time.perf_counter()
        work = start_sum(tensor, "tp")
        if work is not None:
            work.wait()
        torch.cuda.synchronize(mesh.device)
        found.append(time.perf_counter() - begin)
    return statistics.median(found[1:])
