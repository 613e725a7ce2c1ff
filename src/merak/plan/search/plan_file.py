"""Plan files: a plan as JSON, with the model and the number of devices that it is for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from merak.checkpoint.description import describe_model, first_difference
from merak.core.errors import ArgumentsError, PlanError
from merak.core.files.plan_file import read_plan_content, sealed_plan
from merak.core.kinds import from_fields
from merak.plan.cost.optimizer_memory import OptimizerFactory
from merak.plan.options import PRICED, ParallelOptions
from merak.plan.price.candidate import Candidate
from merak.plan.price.price import Price
from merak.plan.price.workload import Workload


@dataclass(frozen=True, slots=True)
class PlanFile:
    """A plan, and what it was made for.

    Args:
        model: description of the model.
        candidate: how the job is laid out.
        price: the figures of its price, by name.
        cluster: the devices, as they were named.
        autocast: type of mixed precision that it was priced with, such as "bfloat16".
        sequence: tokens of a sequence; None where there are none.
        optimizer: name of its class; None where no state was forecast.
        common: the options that all layouts of the job have, by name; files that are older than
            an option do not have it.
    """

    model: Mapping[str, Any]
    candidate: Candidate
    price: Mapping[str, Any]
    cluster: str = ""
    autocast: str | None = None
    sequence: int | None = None
    optimizer: str | None = None
    common: Mapping[str, Any] = field(default_factory=dict)

    @property
    def global_batch(self) -> int:
        """Samples of one step of the whole job."""
        return self.candidate.dp * self.candidate.microbatch * self.candidate.num_microbatches

    @property
    def world_size(self) -> int:
        """Number of ranks that the plan takes."""
        return self.candidate.world_size


def plan_of(workload: Workload, price: Price, cluster: str = "") -> PlanFile:
    """The plan file of a price.

    Args:
        workload: the job.
        price: of the plan.
        cluster: the devices, as they were named.
    """
    names = [own.name for own in fields(price) if own.name not in ("candidate", "host")]
    figures = {name: getattr(price, name) for name in names} | {"host": asdict(price.host)}
    casts = None if workload.autocast is None else str(workload.autocast).removeprefix("torch.")
    return PlanFile(
        describe_model(workload.model),
        price.candidate,
        figures,
        cluster,
        casts,
        workload.sequence,
        optimizer_name(workload.optimizer),
        workload.common.priced(),
    )


def optimizer_name(factory: OptimizerFactory | None) -> str | None:
    """Class of the optimizer that a factory makes; None where there is no factory, or it cannot.

    Args:
        factory: makes the optimizer of parameters.
    """
    if factory is None:
        return None
    with suppress(Exception):  # of an optimizer that refuses such a parameter
        return type(factory([nn.Parameter(torch.zeros(2, 2))])).__name__
    return None


_OF_THE_JOB = ("cluster", "autocast", "sequence", "optimizer")


def write_plan(path: Path, plan: PlanFile) -> None:
    """Write a plan file.

    Args:
        path: where.
        plan: what.

    Raises:
        PlanError: it cannot be written.
    """
    content = {
        "world_size": plan.world_size,
        "global_batch": plan.global_batch,
        **{name: getattr(plan, name) for name in _OF_THE_JOB},
        **plan.common,
        "candidate": plan.candidate.values(),
        "price": dict(plan.price),
        "model": dict(plan.model),
    }
    try:
        path.write_text(json.dumps(sealed_plan(content), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise PlanError(f"the plan cannot be written to {path}: {error.strerror}.") from error


def read_plan(path: Path) -> PlanFile:
    """Read a plan file.

    Args:
        path: of the file.

    Raises:
        PlanError: it cannot be read, is no plan, or of a version that is not known.
    """
    content = read_plan_content(path)
    try:
        candidate = candidate_from(dict(content["candidate"]))
        if candidate.world_size != content["world_size"]:
            raise ValueError(f"its degrees are not for world_size={content['world_size']}")
        names = ("model", "price", *_OF_THE_JOB)
        given = {"candidate": candidate} | {name: content[name] for name in names}
        given["common"] = {name: content[name] for name in PRICED if name in content}
        from_fields(ParallelOptions, given["common"])  # refuses values that no option has
        return from_fields(PlanFile, given)
    except (KeyError, TypeError, ValueError, OverflowError, ArgumentsError) as error:
        raise PlanError(
            f"the plan {path} has an error ({error}); plan again with `merak plan`."
        ) from error


_NEEDED = {"dp", "tp", "pp", "microbatch", "num_microbatches", "schedule_options", "partition"}
"""Fields that every plan file has; others were no options when the oldest ones were written."""

_FORMER = {"offload": "offload_activations"}
"""Names of fields in files that were written before they had the names of the options."""


def candidate_from(given: Mapping[str, Any]) -> Candidate:
    """The candidate of the fields in a plan file.

    Args:
        given: its fields, as they were or as JSON has them.

    Raises:
        ValueError: a field is unknown, missing, or of another type, or a number is below 1.
    """
    given = {_FORMER.get(name, name): value for name, value in given.items()}
    for name in given.keys() - {part.name for part in fields(Candidate)}:
        raise ValueError(f"{name} is unknown")
    for name in _NEEDED - given.keys():
        raise ValueError(f"{name} is missing")
    own = from_fields(Candidate, given)
    counts = [getattr(own, n) for n in ("dp", "tp", "pp", "cp", "ep", "microbatch")]
    if min(*counts, own.num_microbatches, *(own.partition or ())) < 1:
        raise ValueError("a degree, or a number of samples or segments, is below 1")
    return replace(own, schedule_options=MappingProxyType(dict(own.schedule_options)))


def refuse_other_model(plan: PlanFile, model: nn.Module, path: str) -> None:
    """Refuse a plan for another model.

    Args:
        plan: that was read.
        model: the job's.
        path: of the plan, for the message.

    Raises:
        PlanError: the plan is for another model; the first difference is named.
    """
    now = json.loads(json.dumps(describe_model(model)))
    saved = json.loads(json.dumps(dict(plan.model)))
    difference = first_difference(saved, now, "the plan")
    if difference is not None:
        raise PlanError(
            f"the plan {path} is for another model: {difference}; plan again with `merak plan`."
        )


def job_differences(plan: PlanFile, sequence: int | None, optimizer: str | None) -> list[str]:
    """Sentences on a job whose time and memory are not those of its plan.

    Args:
        plan: that is followed.
        sequence: tokens of a sequence of the job; None where there are none.
        optimizer: class of the job's optimizer.
    """
    found = []
    if None not in (plan.sequence, sequence) and plan.sequence != sequence:
        found.append(
            f"the plan was priced for sequences of {plan.sequence} tokens, but the first batch has "
            f"{sequence}; plan again with --seq {sequence} for this job's time and memory."
        )
    if None not in (plan.optimizer, optimizer) and plan.optimizer != optimizer:
        found.append(
            f"the plan was priced with {plan.optimizer}, but this job steps with {optimizer}; plan "
            "again with --optimizer for its memory."
        )
    return found
