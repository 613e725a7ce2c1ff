"""Degrees of a job: those given, those of its plan, and smaller ones where ranks are missing."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from merak.core.errors import MeshError, PlanError
from merak.core.files.json_file import UnreadableFile, read_json

AUTO_PLAN = "auto"
"""The plan that is searched when the model and its batches are known."""


class Degrees(NamedTuple):
    """Degrees of a mesh of ranks."""

    dp: int
    tp: int
    pp: int
    cp: int = 1

    @property
    def replicas(self) -> int:
        """Ranks that hold the same parameters of a stage: dp × cp."""
        return self.dp * self.cp

    def __str__(self) -> str:
        context = f" × cp={self.cp}" if self.cp > 1 else ""
        return f"dp={self.dp} × tp={self.tp} × pp={self.pp}{context}"


class GivenDegrees(NamedTuple):
    """Degrees as a user gives them; None for one that is left out."""

    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    ep: int | None = None

    @property
    def axes(self) -> tuple[int | None, ...]:
        """The degrees whose product is the number of ranks: all but ep."""
        return self[:4]

    def __str__(self) -> str:
        given = self._asdict().items()
        return " × ".join(f"{axis}={degree}" for axis, degree in given if degree is not None)

    def filled(self) -> Degrees:
        """The degrees of a job without a plan, where one that is left out is 1."""
        return Degrees(*(1 if degree is None else degree for degree in self.axes))

    def check(self) -> None:
        """Refuse degrees that are none.

        Raises:
            MeshError: one is not a whole number of 1 or more.
        """
        for axis, degree in self._asdict().items():
            if degree is None:
                continue
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise MeshError(
                    f"{axis}={degree!r} is not a degree; use a whole number of 1 or more."
                )

    def check_ranks(self, num_ranks: int) -> None:
        """Refuse degrees with which no plan takes all ranks.

        Raises:
            MeshError: their product does not divide the number of ranks.
        """
        self.check()
        axes = self.axes
        product = math.prod(degree for degree in axes if degree is not None)
        if num_ranks % product or (None not in axes and product != num_ranks):
            raise MeshError(
                f"{self} does not fit {num_ranks} ranks; use degrees whose product "
                f"{'divides' if None in axes else 'is'} that number, or leave them to the plan."
            )
        if None not in axes:
            check_expert_degree(self.ep, self.filled())
        elif self.ep is not None and num_ranks % self.ep:
            raise MeshError(
                f"ep={self.ep} does not divide the number of ranks ({num_ranks}), which have the "
                "experts of a layer between them; use a divisor, or leave ep to the plan."
            )


def check_expert_degree(ep: object, degrees: Degrees) -> int:
    """Check an expert parallel degree.

    Args:
        ep: as a user gives it; None for 1.
        degrees: the other degrees.

    Returns:
        The degree.

    Raises:
        MeshError: it is neither 1 nor the tensor parallel degree, nor, where that is 1, a divisor
            of the number of replicas.
    """
    if ep is None:
        return 1
    if not isinstance(ep, int) or isinstance(ep, bool) or ep < 1:
        raise MeshError(f"ep={ep!r} is not a degree; use a whole number of 1 or more.")
    tp, replicas = degrees.tp, degrees.replicas
    if tp > 1 and ep not in (1, tp):
        raise MeshError(
            f"ep={ep} does not fit tp={tp}, whose ranks have the experts of a layer between them; "
            f"use ep={tp}, or ep=1, which splits every expert, or tp=1 and a multiple of {ep} "
            "replicas."
        )
    if tp == 1 and replicas % ep:
        raise MeshError(
            f"ep={ep} does not divide dp × cp = {replicas}, the replicas that have the experts of "
            f"a layer between them; use ep={_divisors(replicas)}, or tp={ep}."
        )
    return ep


def _divisors(number: int) -> str:
    """The divisors of a number, as a list in words."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return ", ".join(map(str, sorted({*small, *(number // n for n in small)})))


def smaller_degrees(wanted: Degrees, num_ranks: int) -> Degrees | None:
    """Choose the degrees for fewer ranks than a job is written for; None where none fit.

    No degree grows, and tp stays or is divided, since it divides heads and columns. Replicas take
    the same samples a step between them, so a dp that divides the wanted one comes first, with
    which every number of accumulation steps does. Of those, tp stays as it is before pp does: a
    smaller tp changes every weight's shard.

    Args:
        wanted: the job's own degrees.
        num_ranks: that are there.
    """
    found = [
        Degrees(num_ranks // (tp * pp * wanted.cp), tp, pp, wanted.cp)
        for tp in range(1, min(wanted.tp, num_ranks) + 1)
        for pp in range(1, min(wanted.pp, num_ranks) + 1)
        if wanted.tp % tp == 0 and num_ranks % (tp * pp * wanted.cp) == 0
    ]
    fitting = [degrees for degrees in found if degrees.dp <= wanted.dp]
    return max(fitting, key=lambda d: (wanted.dp % d.dp == 0, d.tp, d.pp), default=None)


PLAN_FORMAT = "merak-plan"
"""What a plan file says that it is."""

PLAN_VERSION = 2

_PLANNED = ("candidate", "price")
"""Fields of a plan file that say what was planned; the others say for what."""


def plan_checksum(content: Mapping[str, Any]) -> str:
    """Checksum of what a plan was made for: model, devices, batch and options of the job.

    Args:
        content: of a plan file, with or without its checksum.
    """
    given = {name: own for name, own in content.items() if name not in (*_PLANNED, "checksum")}
    text = json.dumps(given, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def read_plan_content(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the JSON object of a plan file.

    Args:
        path: of the file, as `merak plan --output` has written it.

    Raises:
        PlanError: it cannot be read, is no plan, or of a version that is not known.
    """
    try:
        content = read_json(path)
    except UnreadableFile as error:
        raise PlanError(
            f"the plan {path} {error}; name a file that `merak plan --output` has written."
        ) from error
    if not isinstance(content, dict) or content.get("format") != PLAN_FORMAT:
        raise PlanError(f"{path} is no plan; give a file that `merak plan --output` has written.")
    if content.get("version") != PLAN_VERSION:
        raise PlanError(
            f"the plan {path} has version {content.get('version')!r}, and this Merak reads version "
            f"{PLAN_VERSION}; plan again with `merak plan`."
        )
    # Files before there was one have none.
    if content.get("checksum", expected := plan_checksum(content)) != expected:
        raise PlanError(
            f"the plan {path} is not for what it was made for: its checksum is "
            f"{content['checksum']!r}, and that of its model, devices, batch and options is "
            f"{expected!r}; plan again with `merak plan`."
        )
    return content


def plan_degrees(path: str | os.PathLike[str]) -> Degrees:
    """Degrees of a plan file.

    Args:
        path: of the file.

    Raises:
        PlanError: it cannot be read, or is no plan.
    """
    content = read_plan_content(path)
    candidate = content.get("candidate")
    found: list[Any] = [
        candidate.get(axis, Degrees._field_defaults.get(axis)) if isinstance(candidate, dict) else 0
        for axis in Degrees._fields
    ]
    if not all(isinstance(degree, int) and degree > 0 for degree in found):
        raise PlanError(f"the plan {path} has no degrees; plan again with `merak plan`.")
    return Degrees(*found)


def plan_expert_degree(path: str | os.PathLike[str]) -> int:
    """Expert parallel degree of a plan file.

    Args:
        path: of the file.

    Raises:
        PlanError: it cannot be read, or is no plan.
    """
    found = read_plan_content(path).get("candidate", {}).get("ep", 1)
    if not isinstance(found, int):
        raise PlanError(f"the plan {path} has no degrees; plan again with `merak plan`.")
    return found


def wanted_degrees(
    given: GivenDegrees, plan: str | os.PathLike[str] | None, elastic: bool
) -> Degrees:
    """Degrees that a job is written for: of its plan, or those given where there is no plan.

    Args:
        given: as the user gives them.
        plan: file of a plan; "auto" counts every rank as a replica until the plan is searched.
        elastic: whether fewer ranks may be there.

    Raises:
        PlanError: the plan cannot be read, or has other degrees than those given.
        MeshError: the degrees given do not fit the ranks of a plan that is searched.
    """
    if plan is None:
        return given.filled()
    if plan == AUTO_PLAN:
        if elastic:
            raise MeshError(
                "elastic=True lowers degrees that are given, but plan='auto' chooses them for the "
                "ranks that are there; leave elastic out, and set global_batch."
            )
        num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
        given.check_ranks(num_ranks)
        return Degrees(num_ranks, 1, 1)
    planned = plan_degrees(plan)
    if any(own not in (None, other) for own, other in zip(given.axes, planned, strict=True)):
        raise PlanError(
            f"{given} contradicts the plan {plan}, which has {planned}; leave the degrees out, or "
            "plan again."
        )
    return planned
