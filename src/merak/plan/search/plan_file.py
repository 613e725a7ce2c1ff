"""Plan files: a plan as JSON, with the model and the number of devices that it is for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn

from merak.checkpoint.description import describe_model, first_difference
from merak.core.elastic import PLAN_FORMAT, PLAN_VERSION, read_plan_content
from merak.core.errors import PlanError
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
        master_weights: whether parameters of a lower precision have float32 masters.
    """

    model: Mapping[str, Any]
    candidate: Candidate
    price: Mapping[str, Any]
    cluster: str = ""
    autocast: str | None = None
    master_weights: bool = False

    @property
    def world_size(self) -> int:
        """Ranks that it takes."""
        return self.candidate.world_size


def plan_of(workload: Workload, price: Price, cluster: str = "") -> PlanFile:
    """The plan file of a price.

    Args:
        workload: the job.
        price: of the plan.
        cluster: the devices, as they were named.
    """
    names = [own.name for own in fields(price) if own.name != "candidate"]
    figures = {name: getattr(price, name) for name in names}
    casts = None if workload.autocast is None else str(workload.autocast).removeprefix("torch.")
    return PlanFile(
        describe_model(workload.model),
        price.candidate,
        figures,
        cluster,
        casts,
        workload.master_weights,
    )


def write_plan(path: Path, plan: PlanFile) -> None:
    """Write a plan file.

    Args:
        path: where.
        plan: what.

    Raises:
        PlanError: it cannot be written.
    """
    own = plan.candidate
    candidate = {part.name: getattr(own, part.name) for part in fields(own)}
    candidate["schedule_options"] = dict(own.schedule_options)
    content = {
        "format": PLAN_FORMAT,
        "version": PLAN_VERSION,
        "world_size": plan.world_size,
        "cluster": plan.cluster,
        "autocast": plan.autocast,
        "master_weights": plan.master_weights,
        "candidate": candidate,
        "price": dict(plan.price),
        "model": dict(plan.model),
    }
    try:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
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
        candidate = _candidate(content["candidate"])
        if candidate.world_size != content["world_size"]:
            raise ValueError(f"its degrees are not for world_size={content['world_size']}")
        names = ("model", "price", "cluster", "autocast", "master_weights")
        return PlanFile(candidate=candidate, **{name: content[name] for name in names})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PlanError(
            f"the plan {path} has an error ({error}); plan again with `merak plan`."
        ) from error


def _candidate(given: Mapping[str, Any]) -> Candidate:
    own = dict(given)
    own["schedule_options"] = MappingProxyType(dict(own["schedule_options"]))
    if own["partition"] is not None:
        own["partition"] = tuple(own["partition"])
    for name in ("dp", "tp", "pp", "microbatch", "num_microbatches"):
        if not isinstance(own[name], int) or own[name] < 1:
            raise ValueError(f"{name}={own[name]!r}")
    return Candidate(**own)


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
