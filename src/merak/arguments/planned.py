"""Training arguments of a plan: from its file, or pinned for a search and set by its result."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from merak.arguments.fields import AUTO, AutoBatch, TrainingFields, given_arguments
from merak.core.elastic import AUTO_PLAN, GivenDegrees, plan_from_outside
from merak.core.errors import ArgumentsError
from merak.core.mesh import Mesh
from merak.plan.price.candidate import Candidate, option_values
from merak.plan.search.explain import degrees
from merak.plan.search.pinned import Pinned, pinned_options
from merak.plan.search.plan_file import PlanFile, read_plan

_CHOSEN = "_is_plan_chosen"
"""Attribute of arguments whose plan has been searched and set."""


def apply_plan(arguments: TrainingFields, mesh: Mesh) -> None:
    """Set arguments as their plan file says.

    Args:
        arguments: whose `plan` names the file, or where it is None, the environment; nothing is
            set where there is none, or "auto".
        mesh: of the job.

    Raises:
        ArgumentsError: the plan is for other degrees, or an argument contradicts it or the mesh.
        PlanError: the plan cannot be read.
    """
    if arguments.per_device_train_batch_size == AUTO:
        arguments.per_device_train_batch_size = AutoBatch()
    _check_given_degrees(arguments, mesh)
    if arguments.plan is None:
        arguments.plan = plan_from_outside()
    if mesh.given is not None:
        _check_auto(arguments)
    if arguments.plan == AUTO_PLAN or not isinstance(arguments.plan, str | os.PathLike):
        return  # what is no path is refused with the fields
    path = os.fspath(arguments.plan)
    plan = read_plan(Path(path))
    _check_degrees(plan.candidate, mesh, path)
    _check_global_batch(arguments, plan, path)
    named = given_arguments(arguments)
    defaults = {own.name: own.default for own in dataclasses.fields(TrainingFields)}
    for name, value in planned_arguments(plan).items():
        given = getattr(arguments, name)
        is_left_out = name not in named or given in (None, AUTO)
        is_free = isinstance(given, AutoBatch) or (is_left_out and given == defaults[name])
        if not is_free and not _same(given, value):
            raise ArgumentsError(
                f"{name}={given!r} contradicts the plan {path}, which has {value!r}; leave it out, "
                "or plan again."
            )
        if isinstance(given, AutoBatch) or not _same(given, value):
            setattr(arguments, name, value)


def _check_auto(arguments: TrainingFields) -> None:
    """Have the trainer search the plan whose degrees `merak.init` has left open."""
    if arguments.plan is None:
        arguments.plan = AUTO_PLAN
    if arguments.plan != AUTO_PLAN:
        raise ArgumentsError(
            f"plan={arguments.plan!r} contradicts merak.init(plan='auto'); give both the same."
        )


def planned_arguments(plan: PlanFile) -> dict[str, Any]:
    """Training arguments of a plan, by name.

    Args:
        plan: as it was read.
    """
    return {
        "bf16": plan.autocast == "bfloat16",
        "fp16": plan.autocast == "float16",
        **plan.common,
        **layout_arguments(plan.candidate),
    }


def layout_arguments(candidate: Candidate) -> dict[str, Any]:
    """Training arguments of a layout, by name.

    Args:
        candidate: the layout.
    """
    return {
        "per_device_train_batch_size": candidate.microbatch,
        "gradient_accumulation_steps": candidate.num_microbatches,
        **candidate.options(),
    }


def _check_given_degrees(arguments: TrainingFields, mesh: Mesh) -> None:
    laid = mesh.given or mesh.degrees._replace(dp=mesh.wanted_dp or mesh.dp)
    for axis, degree in laid._asdict().items():
        given = getattr(arguments, axis)
        if isinstance(given, int) and given != degree:  # of another kind, it is refused later
            has = f"{axis}={degree}" if degree is not None else f"no {axis}"
            raise ArgumentsError(
                f"{axis}={given!r} comes too late, since merak.init has laid the ranks out with "
                f"{has}; give it to merak.init, or leave all degrees out there, so that it reads "
                f"--{axis} from the command line."
            )


def _check_degrees(candidate: Candidate, mesh: Mesh, path: str) -> None:
    dp = mesh.wanted_dp or mesh.dp  # where a host is lost, the rest of the job goes on
    laid = mesh.degrees._replace(dp=dp)
    planned = GivenDegrees(candidate.dp, candidate.tp, candidate.pp, candidate.cp, candidate.ep)
    if planned == laid:
        return
    named = degrees(planned)
    raise ArgumentsError(
        f"the plan {path} is for {named} ({candidate.world_size} ranks), but merak.init laid "
        f"{mesh.world_size} ranks out as {degrees(laid)}; call "
        f"merak.init(plan={path!r}) on {candidate.world_size} ranks, or plan again."
    )


def _check_global_batch(arguments: TrainingFields, plan: PlanFile, path: str) -> None:
    if arguments.global_batch not in (None, plan.global_batch):
        raise ArgumentsError(
            f"global_batch={arguments.global_batch} contradicts the plan {path}, whose step has "
            f"{plan.global_batch} samples; leave it out, or plan again."
        )


def _same(given: Any, value: Any) -> bool:
    if isinstance(given, Mapping) and isinstance(value, Mapping):
        return dict(given) == dict(value)
    return bool(given == value)


# The samples of a step


class _Accumulated(int):
    """Accumulation steps that are for the mesh's dp already, also in a copy of the arguments."""


def set_accumulation(arguments: TrainingFields, mesh: Mesh) -> None:
    """Set the accumulation steps of the mesh's dp, unless the microbatch is still to be chosen.

    Args:
        arguments: that are in their ranges.
        mesh: of the job.

    Raises:
        ArgumentsError: the samples of a step cannot be shared out equally.
    """
    given, samples = arguments.gradient_accumulation_steps, arguments.global_batch
    if samples is None or chooses_plan(arguments) or chooses_microbatch(arguments):
        arguments.gradient_accumulation_steps = accumulation_steps(given, mesh)
        return
    microbatch = int(arguments.per_device_train_batch_size)
    each = microbatch * mesh.dp
    if samples % each:
        raise ArgumentsError(
            f"global_batch={samples} is no multiple of per_device_train_batch_size={microbatch} × "
            f"dp={mesh.dp}; use a multiple of {each}, or per_device_train_batch_size='auto'."
        )
    if given not in (1, samples // each):
        raise ArgumentsError(
            f"gradient_accumulation_steps={given} contradicts global_batch={samples}, for which "
            f"{samples // each} microbatches of {microbatch} on dp={mesh.dp} replicas are right; "
            "leave one of them out."
        )
    arguments.gradient_accumulation_steps = _Accumulated(samples // each)


def accumulation_steps(wanted: int, mesh: Mesh) -> int:
    """Accumulation steps with which a step has the samples of the dp that the script names.

    Args:
        wanted: for the dp of `merak.init`.
        mesh: of the job, of which a host may be lost.

    Raises:
        ArgumentsError: the microbatches of a step cannot be shared out equally.
    """
    if not mesh.wanted_dp or isinstance(wanted, _Accumulated):
        return wanted
    microbatches = wanted * mesh.wanted_dp
    if microbatches % mesh.dp:
        raise ArgumentsError(
            f"gradient_accumulation_steps={wanted} × dp={mesh.wanted_dp} = {microbatches} "
            f"microbatches a step cannot be shared out over the {mesh.dp} replicas that the ranks "
            f"are enough for; use a number of accumulation steps that {mesh.dp} divides."
        )
    return _Accumulated(microbatches // mesh.dp)


# Choices that are made when the model is known


def chooses_plan(arguments: TrainingFields) -> bool:
    """Whether the layout is still to be searched."""
    return arguments.plan == AUTO_PLAN and not hasattr(arguments, _CHOSEN)


def chooses_microbatch(arguments: TrainingFields) -> bool:
    """Whether the user leaves the microbatch of a layout that is there to be chosen."""
    given = arguments.per_device_train_batch_size
    return isinstance(given, AutoBatch) and not given.is_left_out


def step_samples(arguments: TrainingFields, mesh: Mesh) -> int:
    """Samples of one step of the whole job, which no choice changes.

    Args:
        arguments: of a job whose plan or microbatch is to be chosen.
        mesh: of the job; where its dp is to be chosen, every rank counts as a replica.
    """
    if arguments.global_batch is not None:
        return arguments.global_batch
    replicas = mesh.dp if mesh.given is None or mesh.given.dp is None else mesh.given.dp
    each = int(arguments.per_device_train_batch_size) * arguments.gradient_accumulation_steps
    return each * replicas


def pinned_arguments(arguments: TrainingFields, mesh: Mesh) -> Pinned:
    """Choices that a search leaves as they are: arguments that are given.

    Args:
        arguments: as the user gives them.
        mesh: of the job.
    """
    given_degrees = mesh.degrees if mesh.given is None else mesh.given
    given = arguments.per_device_train_batch_size
    microbatch = None if isinstance(given, AutoBatch) else int(given)
    return pinned_options(arguments, given_degrees, microbatch, given_arguments(arguments))


def given_layout(arguments: TrainingFields, mesh: Mesh) -> Candidate:
    """The layout of a job of which the microbatch alone is to be chosen; here it is 1.

    Args:
        arguments: as the user gives them.
        mesh: of the job.
    """
    count = step_samples(arguments, mesh) // mesh.dp
    own = option_values(vars(arguments))
    return Candidate(**mesh.degrees._asdict(), num_microbatches=count, **own)


def set_layout(arguments: TrainingFields, candidate: Candidate) -> None:
    """Set the arguments of a layout that a search has found.

    Args:
        arguments: whose plan was to be searched.
        candidate: the layout.
    """
    for name, value in layout_arguments(candidate).items():
        setattr(arguments, name, value)
    setattr(arguments, _CHOSEN, True)


def set_microbatch(arguments: TrainingFields, candidate: Candidate) -> None:
    """Set the microbatch that was chosen, and as many accumulation steps as a step then has.

    Args:
        arguments: whose microbatch was to be chosen.
        candidate: the layout with it.
    """
    arguments.per_device_train_batch_size = candidate.microbatch
    arguments.gradient_accumulation_steps = _Accumulated(candidate.num_microbatches)
