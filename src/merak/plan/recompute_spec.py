"""The argument `recompute`: a mode, a fraction of every stage, or segments by number or name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from merak.core.errors import PlanError
from merak.plan.balance import Timed

Recompute = str | float | Sequence[int | str] | None
"""The argument's values: "off", "full", "selective", "auto", a fraction, or some segments."""

RECOMPUTES = ("off", "selective", "full")
"""Recomputations that are searched, from the most memory to the least."""


class Mode(Enum):
    """Form of the argument `recompute`."""

    SCHEDULE = "as the schedule says"
    FRACTION = "a fraction of every stage"
    SEGMENTS = "these segments"
    SELECTIVE = "all but selective operators"
    AUTO = "as little as the memory allows"


@dataclass(frozen=True, slots=True)
class RecomputeSpec:
    """The argument `recompute`, parsed.

    Args:
        mode: its form.
        fraction: of every stage's segments that recompute, in mode `FRACTION`.
        segments: numbers or names of those that recompute, in mode `SEGMENTS`.
    """

    mode: Mode
    fraction: float = 0.0
    segments: tuple[int | str, ...] = ()

    def numbers(self, names: Sequence[str], argument: str = "recompute") -> frozenset[int]:
        """Numbers of the segments that the argument lists.

        Args:
            names: of the model's segments, in order.
            argument: the name of the argument, for messages.

        Raises:
            PlanError: there is no segment of that number or name.
        """
        numbers: set[int] = set()
        for segment in self.segments:
            found = [i for i, name in enumerate(names) if segment in (i, name)]
            if not found:
                raise PlanError(
                    f"{argument} names the segment {segment!r}, but the model's are 0 to "
                    f"{len(names) - 1}, from {names[0]!r} to {names[-1]!r}; `merak trace` lists "
                    "them."
                )
            numbers.update(found)
        return frozenset(numbers)


def parse_recompute(value: Recompute) -> RecomputeSpec:
    """Parse the argument `recompute`.

    Args:
        value: None for the schedule's own choice; "off", "full", "selective" or "auto"; the
            fraction of every stage's segments that recompute, 0 to 1; or segments by number or
            name, as a list or as a text with commas.

    Raises:
        PlanError: it is none of these.
    """
    if value is None:
        return RecomputeSpec(Mode.SCHEDULE)
    if isinstance(value, str):
        return _parse_text(value.strip())
    if isinstance(value, int | float):
        return _fraction(float(value), value)
    segments = tuple(value)
    if not all(isinstance(s, int | str) and not isinstance(s, bool) for s in segments):
        raise _refusal(value)
    return RecomputeSpec(Mode.SEGMENTS, segments=segments)


@dataclass(frozen=True, slots=True)
class _Times:
    """Times of a segment that recomputes, seconds."""

    forward_s: float
    backward_s: float


def recomputing_times(
    times: Sequence[Timed], names: Sequence[str], value: Recompute
) -> Sequence[Timed]:
    """Times of segments for the balance: a backward includes the forward that it computes again.

    Of a fraction of every stage's segments, every segment gets that fraction, since the stages are
    not known yet. Selective recomputation is short, and what "auto" or a schedule recomputes
    follows from the stages: none of the three is counted.

    Args:
        times: of every segment, without recomputation.
        names: of the segments.
        value: the argument `recompute`.

    Raises:
        PlanError: it is no such argument, or names a segment that does not exist.
    """
    spec = parse_recompute(value)
    if spec.mode is Mode.FRACTION:
        fractions = [spec.fraction] * len(times)
    elif spec.mode is Mode.SEGMENTS:
        chosen = spec.numbers(names)
        fractions = [float(index in chosen) for index in range(len(times))]
    else:
        return times
    if not any(fractions):
        return times
    return [
        # A segment without a backward is not computed again.
        _Times(own.forward_s, own.backward_s + fraction * own.forward_s if own.backward_s else 0.0)
        for own, fraction in zip(times, fractions, strict=True)
    ]


def _parse_text(text: str) -> RecomputeSpec:
    if text in ("off", "full"):
        return RecomputeSpec(Mode.FRACTION, fraction=float(text == "full"))
    if text == "auto":
        return RecomputeSpec(Mode.AUTO)
    if text == "selective":
        return RecomputeSpec(Mode.SELECTIVE)
    if "," in text:
        parts = [part.strip() for part in text.split(",")]
        segments = tuple(int(part) if part.isdecimal() else part for part in parts if part)
        return RecomputeSpec(Mode.SEGMENTS, segments=segments)
    try:
        fraction = float(text)
    except ValueError:
        raise _refusal(text) from None
    return _fraction(fraction, text)


def _fraction(fraction: float, value: object) -> RecomputeSpec:
    if not 0.0 <= fraction <= 1.0:
        raise _refusal(value)
    return RecomputeSpec(Mode.FRACTION, fraction=fraction)


def _refusal(value: object) -> PlanError:
    return PlanError(
        f"recompute={value!r} is no choice of what to recompute; use 'off', 'full', "
        "'selective', 'auto', the fraction of every stage's segments that recompute (0 to 1), or "
        "segments such as '3,4,7'."
    )
