"""Description of a job on rank 0, for its display and its record, and the base of its MFU."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from merak.core.health.status import waiting_for_all
from merak.core.mesh import Mesh
from merak.core.rank0 import decide_on_rank0, has_peers
from merak.core.tensor_meta import Signature
from merak.plan.activations.forecast import Forecast
from merak.plan.expected.job import job_record
from merak.record.run import JobRecord

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Description:
    """Model, layout, cluster and options of a job, as its record describes them.

    Args:
        job: as it was laid out; None on other ranks than 0, and where it cannot be described.
        utilisation: MFU of a job with one microbatch a second, the same on every rank; None where
            no peak is known.
    """

    job: JobRecord | None = None
    utilisation: float | None = None


def describe_job(
    forecast: Forecast,
    sample: Signature,
    cache: Path | None,
    autocast: torch.dtype | None,
    process_bytes: int | None,
) -> Description:
    """Describe a job that has been laid out; all ranks call it together.

    Args:
        forecast: of the job.
        sample: columns of a microbatch.
        cache: folder of this machine's measured speeds.
        autocast: type of mixed precision; None for that of the parameters.
        process_bytes: of this process before it had its weights; None where it is not known.
    """
    made: list[JobRecord] = []
    base_bytes = _of_pp_ranks(forecast.mesh, process_bytes)

    def utilisation() -> float | None:
        try:
            job = job_record(forecast, sample, cache, autocast)
        except Exception as error:  # training is worth more than its description
            logger.warning("the job cannot be described for its display and record: %s", error)
            return None
        made.append(job if job.on_gpu else replace(job, base_bytes=base_bytes))
        peak = job.peak_flops_per_s
        return None if not peak else job.flops / (peak * job.num_ranks)

    base = decide_on_rank0(forecast.mesh, "the base of MFU", utilisation)
    return Description(made[0] if made else None, base)


def _of_pp_ranks(mesh: Mesh, own_bytes: int | None) -> tuple[int | None, ...]:
    """Bytes of the largest process of every pp rank; a collective of all ranks."""
    everyone: list[tuple[int, int | None]] = [(mesh.pp_rank, own_bytes)]
    if has_peers(mesh):
        everyone *= mesh.world_size
        with waiting_for_all("the memory of"):
            dist.all_gather_object(everyone, (mesh.pp_rank, own_bytes))
    return tuple(
        max((own for rank, own in everyone if rank == pp_rank and own is not None), default=None)
        for pp_rank in range(mesh.pp)
    )
