"""Figures of a job between two logs: throughput, MFU, bubble, and memory of every pp rank."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import fmean

import psutil
import torch

from merak.core.mesh import Mesh
from merak.engine.health.step_records import OwnStep

_GB = 1e9


@dataclass(frozen=True, slots=True)
class Interval:
    """Tokens, steps and seconds of training between two logs.

    Args:
        seconds: without evaluations and checkpoints.
        steps: optimizer steps.
        microbatches: of all replicas.
        tokens: input tokens of all replicas; 0 where the model's inputs are no tokens.
    """

    seconds: float
    steps: int
    microbatches: int
    tokens: int


@dataclass(frozen=True, slots=True)
class OwnFigures:
    """Memory of one rank, and its busy time in each of its last steps.

    Args:
        memory_bytes: that it holds; None where the system does not tell.
        busy_s: seconds in which it computed, of each of its last steps.
        pipeline_s: seconds from the beginning to its last action, of each of them.
    """

    memory_bytes: int | None
    busy_s: tuple[float, ...] = ()
    pipeline_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Figures:
    """Logged figures of the job, and memory and busy fraction of each pp rank.

    Args:
        values: by name, as they are logged.
        memory_bytes: of every pp rank, of its rank that has most; None where it is not known.
        busy: fraction of the pipeline's time in which a pp rank computes; empty for one pp rank.
    """

    values: dict[str, float] = field(default_factory=dict)
    memory_bytes: tuple[int | None, ...] = ()
    busy: tuple[float, ...] = ()


def own_figures(memory_bytes: int | None, steps: Sequence[OwnStep]) -> OwnFigures:
    """Figures of this rank.

    Args:
        memory_bytes: that it holds; None where the system does not tell.
        steps: its last recorded steps.
    """
    return OwnFigures(
        memory_bytes,
        tuple(step.busy_s for step in steps),
        tuple(step.pipeline_s for step in steps),
    )


def job_figures(
    interval: Interval,
    everyone: Sequence[OwnFigures],
    mesh: Mesh,
    memory_name: str,
    utilisation: float | None,
) -> Figures:
    """Figures of the job.

    Args:
        interval: training since the last log.
        everyone: of the ranks in the order pp rank, dp rank, cp rank.
        mesh: the grid of ranks.
        memory_name: of the figure of memory.
        utilisation: MFU of a job with one microbatch a second; None where no peak is known.
    """
    values: dict[str, float] = {}
    if interval.seconds > 0 and interval.tokens:
        values["tokens_per_second"] = round(interval.tokens / interval.seconds, 1)
    if interval.seconds > 0 and interval.steps:
        values["step_seconds"] = round(interval.seconds / interval.steps, 6)
    if interval.seconds > 0 and interval.microbatches and utilisation is not None:
        values["mfu"] = round(utilisation * interval.microbatches / interval.seconds, 5)
    busy = _busy(everyone, mesh)
    if busy:
        values["bubble"] = round(1.0 - fmean(busy), 4)
    memory = tuple(_most(own) for own in by_pp_rank(everyone, mesh))
    known = [own for own in memory if own is not None]
    if known:
        values[memory_name] = round(max(known) / _GB, 3)
    if len(memory) > 1:
        values |= {
            f"{memory_name}_pp{rank}": round(own / _GB, 3)
            for rank, own in enumerate(memory)
            if own is not None
        }
    return Figures(values, memory, busy)


def by_pp_rank(everyone: Sequence[OwnFigures], mesh: Mesh) -> list[Sequence[OwnFigures]]:
    """Figures of the ranks, grouped by their pp rank."""
    count = len(everyone) // mesh.pp
    return [everyone[rank * count : (rank + 1) * count] for rank in range(mesh.pp)]


def _most(ranks: Sequence[OwnFigures]) -> int | None:
    return max((own.memory_bytes for own in ranks if own.memory_bytes is not None), default=None)


def _busy(everyone: Sequence[OwnFigures], mesh: Mesh) -> tuple[float, ...]:
    """Fraction of the pipeline's time in which each pp rank computes, over all replicas.

    All ranks begin a step together, for they have just exchanged what microbatches it has; the
    pipeline's time is that of the rank whose last action ends last.
    """
    if mesh.pp == 1:
        return ()
    rows = by_pp_rank(everyone, mesh)
    fractions: list[list[float]] = [[] for _ in rows]
    for pipeline in zip(*rows, strict=True):
        count = min(len(own.pipeline_s) for own in pipeline)
        for step in range(-count, 0):
            whole_s = max(own.pipeline_s[step] for own in pipeline)
            for rank, own in enumerate(pipeline):
                if whole_s > 0:
                    fractions[rank].append(own.busy_s[step] / whole_s)
    return tuple(round(fmean(own), 4) for own in fractions) if all(fractions) else ()


def memory_bytes(device: torch.device) -> tuple[str, int | None]:
    """The memory of a rank: on a GPU its peak so far, on the CPU its present size.

    Returns:
        What to call it in GB, and bytes; None where the system does not tell.
    """
    if device.type == "cuda":
        return "peak_memory_gb", torch.cuda.max_memory_allocated(device)
    with suppress(psutil.Error, OSError):
        return "memory_gb", psutil.Process().memory_info().rss
    return "memory_gb", None
