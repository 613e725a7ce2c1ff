"""Training arguments from a plan file."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from merak.arguments.fields import TrainingFields
from merak.core.errors import ArgumentsError
from merak.core.mesh import Mesh
from merak.plan.price.candidate import Candidate
from merak.plan.search.plan_file import PlanFile, read_plan


def apply_plan(arguments: TrainingFields, mesh: Mesh) -> None:
    """Set arguments as their plan file says.

    Args:
        arguments: whose `plan` names the file; nothing happens where it is None.
        mesh: of the job.

    Raises:
        ArgumentsError: the plan is for other degrees, or an argument contradicts it.
        PlanError: the plan cannot be read.
    """
    if not isinstance(arguments.plan, str | os.PathLike):  # others are refused with the fields
        return
    path = os.fspath(arguments.plan)
    plan = read_plan(Path(path))
    candidate = plan.candidate
    _check_degrees(candidate, mesh, path)
    defaults = {own.name: own.default for own in dataclasses.fields(TrainingFields)}
    for name, value in planned_arguments(plan).items():
        given = getattr(arguments, name)
        if given not in (defaults[name], value) and not _same(given, value):
            raise ArgumentsError(
                f"{name}={given!r} contradicts the plan {path}, which has {value!r}; leave it out, "
                "or plan again."
            )
        if not _same(given, value):
            setattr(arguments, name, value)


def planned_arguments(plan: PlanFile) -> dict[str, Any]:
    """Training arguments of a plan, by name.

    Args:
        plan: as it was read.
    """
    candidate = plan.candidate
    return {
        "bf16": plan.autocast == "bfloat16",
        "fp16": plan.autocast == "float16",
        "master_weights": plan.master_weights,
        "per_device_train_batch_size": candidate.microbatch,
        "gradient_accumulation_steps": candidate.num_microbatches,
        "schedule": candidate.schedule,
        "schedule_options": dict(candidate.schedule_options) or None,
        "partition": None if candidate.partition is None else list(candidate.partition),
        "recompute": candidate.recompute,
        "offload_activations": candidate.offload,
        "zero": candidate.zero,
        "sequence_parallel": candidate.sequence_parallel,
        "sub_pipelining": candidate.sub_pipelining,
    }


def _check_degrees(candidate: Candidate, mesh: Mesh, path: str) -> None:
    dp = mesh.wanted_dp or mesh.dp  # where a host is lost, the rest of the job goes on
    planned = (candidate.dp, candidate.tp, candidate.pp)
    if planned == (dp, mesh.tp, mesh.pp):
        return
    named = "dp={} tp={} pp={}".format(*planned)
    raise ArgumentsError(
        f"the plan {path} is for {named} ({candidate.world_size} ranks), but merak.init laid "
        f"{mesh.world_size} ranks out as dp={dp} tp={mesh.tp} pp={mesh.pp}; call "
        f"merak.init(plan={path!r}) on {candidate.world_size} ranks, or plan again."
    )


def _same(given: Any, value: Any) -> bool:
    if isinstance(given, Mapping) and isinstance(value, Mapping):
        return dict(given) == dict(value)
    return bool(given == value)
