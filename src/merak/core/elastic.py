"""Degrees of a job: those given, those of its plan, and smaller ones where ranks are missing."""

from __future__ import annotations

import math
import os
import sys
from itertools import pairwise
from typing import NamedTuple

from merak.core.errors import MeshError, PlanError

AUTO_PLAN = "auto"
"""The plan that is searched when the model and its batches are known."""

PLAN_VARIABLE = "MERAK_PLAN"
"""Environment variable with the plan of a job whose script names none: a file, or "auto"."""


def plan_from_outside() -> str | None:
    """The plan that the environment names, as `merak run --plan` has it; None for none."""
    return os.environ.get(PLAN_VARIABLE) or None


def on_command_line(option: str) -> str | None:
    """What the script's command line gives an option of exactly this name; None for nothing.

    Args:
        option: without its dashes.
    """
    words = [*sys.argv[1:], ""]
    for word, following in pairwise(words):
        name, equals, value = word.partition("=")
        if name == f"--{option}":
            return (value if equals else following) or None
    return None


def joined_plan(plan: str | os.PathLike[str] | None) -> str | os.PathLike[str] | None:
    """The plan of a script, or where it names none, the one from outside.

    Raises:
        PlanError: both name one, and they differ.
    """
    outside = plan_from_outside()
    if plan is None or outside is None:
        return outside if plan is None else plan
    if os.path.abspath(plan) != os.path.abspath(outside):
        raise PlanError(
            f"the script has plan={os.fspath(plan)!r} and {PLAN_VARIABLE} is {outside!r}; leave "
            "plan out of merak.init(…), or give both the same."
        )
    return plan


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

    @staticmethod
    def from_outside(reads_command_line: bool = False) -> GivenDegrees:
        """The degrees that the environment names, as `merak run` has them: MERAK_TP and so on.

        Args:
            reads_command_line: whether `--tp` and so on count, of those that it does not name.

        Raises:
            MeshError: one is not a whole number of 1 or more.
        """
        found = {}
        for axis in GivenDegrees._fields:
            place, text = variable_of(axis), os.environ.get(variable_of(axis))
            if not text and reads_command_line:
                place, text = f"--{axis}", on_command_line(axis)
            if text and not (text.isdecimal() and int(text)):
                raise MeshError(
                    f"{place}={text!r} is not a degree; give a whole number of 1 or more, or none."
                )
            found[axis] = int(text) if text else None
        return GivenDegrees(**found)

    def joined(self, outside: GivenDegrees) -> GivenDegrees:
        """The degrees of a script, and of those that it leaves out, the ones from outside.

        Args:
            outside: as of `from_outside`.

        Raises:
            MeshError: one is given by both, and differs.
        """
        for axis, own, other in zip(self._fields, self, outside, strict=True):
            if None not in (own, other) and own != other:
                raise MeshError(
                    f"the script has {axis}={own} and {variable_of(axis)} is {other}; leave "
                    f"{axis} out of merak.init(…), or give both the same."
                )
        pairs = zip(self, outside, strict=True)
        return GivenDegrees(*(other if own is None else own for own, other in pairs))

    def with_replicas(self, num_ranks: int) -> GivenDegrees:
        """The same with a dp that takes all ranks, where it is left out and there is one.

        Raises:
            MeshError: a degree is not a whole number of 1 or more.
        """
        self.check()
        beside = math.prod(self.filled())
        if self.dp is not None or num_ranks % beside:
            return self
        return self._replace(dp=num_ranks // beside)

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


def variable_of(axis: str) -> str:
    """The environment variable with a degree."""
    return f"MERAK_{axis.upper()}"


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
            f"a layer between them; use ep={', '.join(map(str, divisors(replicas)))}, or tp={ep}."
        )
    return ep


def divisors(number: int) -> list[int]:
    """All divisors of a number, in order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if not number % d]
    return sorted({*small, *(number // d for d in small)})


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
