"""Explanations: rejections merged into few lines, and candidates in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from merak.core.elastic import GivenDegrees
from merak.core.units import counted
from merak.plan.options import LAYOUT
from merak.plan.price.candidate import Candidate
from merak.plan.search.ranking import Cause, Rejected, Rejection

MOST_LINES = 24
"""Lines of rejected regions that are shown."""

_SHARED = (("dp", "tp", "pp", "zero"), ("dp", "tp", "pp"), ("tp", "pp"), ("pp",), ())
"""What the candidates of one line share, from the finest lines to the coarsest."""

_OPTIONS = {
    "zero": "zero={}",
    "recompute": "recompute={}",
    "offload_activations": "offload={}",
    "sequence_parallel": "sequence parallel",
    "sub_pipelining": "sub-pipelined",
}
_APART = ("schedule", "schedule_options", "partition")
_OPTIONS |= {name: f"{name}={{}}" for name in LAYOUT if name not in (*_OPTIONS, *_APART)}
_DEFAULTS = {own.name: own.default for own in fields(Candidate)}

_WORDS = {
    Cause.SAVED: "more recomputation",
    Cause.SLOWER: "slower plans",
    Cause.UNPRICED: "not priced",
}


def merge(rejections: Sequence[Rejection], regions: Iterable[Rejected] = ()) -> list[Rejected]:
    """Merge rejections into lines for people.

    Each line says of how many candidates it speaks, and the reason of the nearest of them.

    Args:
        rejections: of single candidates.
        regions: that were never listed.
    """
    lines = list(regions)
    for cause in (Cause.STATE, Cause.MEMORY, Cause.REFUSED):
        lines += _of_cause([own for own in rejections if own.cause is cause])
    for cause, what in _WORDS.items():
        same = [one for one in rejections if one.cause is cause]
        if same:
            nearest = min(same, key=lambda one: one.excess)
            lines.append(Rejected(what, f"{nearest.why}{_such_as(nearest)}", len(same)))
    return lines


def _of_cause(rejections: Sequence[Rejection]) -> list[Rejected]:
    """The finest lines of which there are not too many."""
    groups: dict[str, list[Rejection]] = {}
    for names in _SHARED:
        groups = {}
        for own in rejections:
            what = ", ".join(f"{name}={getattr(own.candidate, name)}" for name in names)
            groups.setdefault(what, []).append(own)
        if len(groups) <= MOST_LINES // 3:
            break
    found = []
    for what, same in groups.items():
        nearest = min(same, key=lambda one: one.excess)
        found.append(Rejected(what or "others", f"{nearest.why}{_such_as(nearest)}", len(same)))
    return found


def _such_as(rejection: Rejection) -> str:
    return f" ({describe(rejection.candidate)})" if rejection.cause is not Cause.REFUSED else ""


def degrees(own: Any) -> str:
    """The degrees of a candidate in words; cp and ep where they are not 1.

    Args:
        own: a candidate, or a report's row of one.
    """
    named = {name: getattr(own, name) for name in GivenDegrees._fields}
    usual = ("dp", "tp", "pp")
    return " ".join(f"{n}={degree}" for n, degree in named.items() if n in usual or degree > 1)


def describe(candidate: Candidate) -> str:
    """The choices of a candidate in one line.

    Args:
        candidate: what to describe.
    """
    options = "".join(f" {key}={value}" for key, value in candidate.schedule_options.items())
    parts = [
        degrees(candidate),
        f"{counted(candidate.num_microbatches, 'microbatch')} of {candidate.microbatch}",
        f"{candidate.schedule}{options}" if candidate.pp > 1 else "",
    ]
    for name, words in _OPTIONS.items():
        value = getattr(candidate, name)
        if value not in (None, _DEFAULTS[name]):
            parts.append(words.format(_recomputed(candidate) if name == "recompute" else value))
    return ", ".join(part for part in parts if part)


def _recomputed(candidate: Candidate) -> str:
    """What is recomputed: one word, or the number of segments of a list."""
    chosen = str(candidate.recompute)
    return f"{counted(chosen.count(','), 'segment')}" if "," in chosen else chosen
