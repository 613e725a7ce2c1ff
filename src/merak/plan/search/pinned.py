"""Choices of a plan that are pinned: the search leaves them as they are."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

from merak.core.elastic import GivenDegrees
from merak.plan.options import LAYOUT, declared
from merak.plan.price.candidate import Candidate, option_values
from merak.schedule.ir import USUAL

_NAMES = frozenset(own.name for own in fields(Candidate)) - {"num_microbatches"}


@dataclass(frozen=True, slots=True, init=False)
class Pinned:
    """Choices of a candidate that the search leaves as they are; None is read of all others.

    Args:
        choices: degrees, microbatch and options of a `Candidate`, by name.
    """

    choices: Mapping[str, Any]

    def __init__(self, **choices: Any) -> None:
        """Pin choices.

        Args:
            **choices: by name; None, and a schedule's options that are empty, pin nothing.

        Raises:
            TypeError: candidates have no such choice.
        """
        if unknown := choices.keys() - _NAMES:
            raise TypeError(f"candidates have no {', '.join(sorted(unknown))}")
        kept = {name: own for name, own in choices.items() if own is not None and own != {}}
        object.__setattr__(self, "choices", kept)

    def __getattr__(self, name: str) -> Any:
        """Value of a choice that is pinned; None, or no options of a schedule, where it is not."""
        if name not in _NAMES:
            raise AttributeError(name)
        return self.choices.get(name, {} if name == "schedule_options" else None)

    @property
    def leaves_context(self) -> bool:
        """Whether context parallel degrees may be searched: sequence parallelism excludes them."""
        return self.cp is None and not self.sequence_parallel

    def frees_pp(self, pp: int) -> bool:
        """Whether half of a pipeline degree may be tried: nothing that is pinned needs all of it.

        A schedule that is pinned runs on several ranks; on one there is none.
        """
        has_schedule = self.schedule in (None, USUAL) or pp > 2
        return self.pp is None and self.partition is None and has_schedule

    def __str__(self) -> str:
        """What is pinned, such as "dp=2, zero=1"; empty for nothing."""
        return ", ".join(f"{name}={value!r}" for name, value in self.choices.items())


def pinned_options(
    options: Any,
    degrees: GivenDegrees,
    microbatch: int | None,
    given: Collection[str] = (),
) -> Pinned:
    """The choices that options make which are given, or not at their default.

    Args:
        options: with the fields of `merak.plan.options.ParallelOptions`.
        degrees: of the job; None for those that are searched.
        microbatch: samples of a microbatch.
        given: names of options that the user gives, at their default or not.
    """
    values = option_values({name: getattr(options, name) for name in LAYOUT})
    chosen = {n: v for n, v in values.items() if n in given or v != declared(n).default}
    if values["schedule_options"]:
        chosen["schedule"] = values["schedule"]
    return Pinned(**degrees._asdict(), microbatch=microbatch, **chosen)
