"""Profiles of a model by name, measured by ranks of this machine or of torchrun."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from merak.core.mesh import mark_used
from merak.core.random import seed_for
from merak.core.start.init import init
from merak.engine.profile.links import SIZES
from merak.engine.profile.measure import ProfiledModel, measure_profile
from merak.launch.ranks import Work, run_ranks, under_torchrun
from merak.plan.profile.profile import Profile
from merak.plan.profile.profile_file import profile_from, profile_text
from merak.plan.profile.saved import save_for_jobs
from merak.zoo.model_source import ModelSource, check_inner_fields, resolve_model
from merak.zoo.workload import example_batch, example_workload


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileJob:
    """Measurements that a profile job takes; sent to ranks by pickle.

    Args:
        degrees: dp, tp and pp of the ranks.
        device: "cpu" or "cuda"; None for what the machine has.
        backend: that carries tensors; None for what fits the device.
        model: whose segments are measured, as `resolve_model` takes it; None for none.
        overrides: fields of its config to change.
        sequence: tokens of a sequence; None for the model's longest, up to 512.
        microbatches: numbers of samples to measure.
        tp: tensor parallel degrees to measure.
        dtype: of the parameters; None for that of the model's config.
        autocast: type of mixed precision; None without.
        trust_remote_code: whether code in the model's folder may run.
        cache: folder of traces, where jobs with plan="auto" find the profile; None for none.
        sizes: bytes of messages and collectives.
        round_s: seconds of a round of calls.
    """

    degrees: tuple[int, int, int] = (1, 1, 1)
    device: str | None = None
    backend: str | None = None
    model: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    sequence: int | None = None
    microbatches: tuple[int, ...] = (1, 2, 4)
    tp: tuple[int, ...] = (1,)
    dtype: torch.dtype | None = None
    autocast: torch.dtype | None = None
    trust_remote_code: bool = False
    cache: Path | None = None
    sizes: tuple[int, ...] = SIZES
    round_s: float = 0.02


def profile_job(job: ProfileJob) -> Profile:
    """Measure a profile, on new ranks of this machine unless torchrun has started some.

    Args:
        job: what to measure.

    Raises:
        MerakError: there is no such model, it cannot be traced, or the degrees do not fit.
    """
    if under_torchrun():
        return profile_from(_measured(job), "the profile")
    dp, tp, pp = job.degrees
    text = run_ranks(Work(_measured, (job,)), dp * tp * pp)
    return profile_from(text, "the profile")


def _measured(job: ProfileJob) -> str:
    """Profile of this rank's job, as text: it goes from process to process."""
    source = _source(job)
    mesh = init(*job.degrees, device=job.device, backend=job.backend)
    mark_used()
    model = None if source is None else _profiled(source, job, mesh.device)
    measured = measure_profile(mesh, model, sizes=job.sizes, round_s=job.round_s)
    if mesh.rank == 0 and job.cache is not None:
        save_for_jobs(job.cache, measured)
    return profile_text(measured)


def _source(job: ProfileJob) -> ModelSource | None:
    if job.model is None:
        return None
    source = resolve_model(job.model, job.overrides, trust_remote_code=job.trust_remote_code)
    check_inner_fields(source.config, job.overrides)
    return source


def _profiled(source: ModelSource, job: ProfileJob, device: torch.device) -> ProfiledModel:
    workload = example_workload(
        source,
        global_batch=max(job.microbatches),
        sequence=job.sequence,
        dtype=job.dtype or getattr(torch, source.dtype),
        autocast=job.autocast,
        device=device,
        cache_dir=job.cache,
    )
    return ProfiledModel(workload, partial(_batch, source, job.sequence), job.microbatches, job.tp)


def _batch(source: ModelSource, sequence: int | None, samples: int) -> dict[str, torch.Tensor]:
    return example_batch(source, sequence, samples, seed_for("profile", samples))
