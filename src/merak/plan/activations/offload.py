"""The argument `offload_activations`: parsing, and the segments that it names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from merak.core.errors import PlanError
from merak.plan.balance import Timed
from merak.plan.partition import Partition
from merak.plan.recompute_spec import Mode, Recompute, RecomputeSpec, parse_recompute

ARGUMENT = "offload_activations"
"""Name of the argument in messages."""

NOTHING = RecomputeSpec(Mode.FRACTION, fraction=0.0)
"""Offload nothing."""


def parse_offload(value: Recompute) -> RecomputeSpec:
    """Parse the argument `offload_activations`.

    Args:
        value: None or "off" for none; "full" for all saved activations; the fraction of every
            stage's saving segments, 0 to 1; segments by number or name, as a list or as a text
            with commas; or "auto" for as few as the memory needs.

    Raises:
        PlanError: it is none of these.
    """
    if value is None:
        return NOTHING
    try:
        spec = parse_recompute(value)
    except PlanError:
        spec = RecomputeSpec(Mode.SELECTIVE)
    if spec.mode is Mode.SELECTIVE:
        raise PlanError(
            f"{ARGUMENT}={value!r} is no choice of activations to offload; use 'off', 'full', "
            "'auto', a fraction of every stage's segments (0 to 1), or segments such as '3,4,7'."
        )
    return spec


def listed(spec: RecomputeSpec, names: Sequence[str], saved: frozenset[int]) -> frozenset[int]:
    """Segments that the argument lists by number or name.

    Args:
        spec: of mode `SEGMENTS`.
        names: of the model's segments.
        saved: those that save their activations.

    Raises:
        PlanError: there is no such segment, or it recomputes.
    """
    numbers = spec.numbers(names, ARGUMENT)
    if numbers - saved:
        first = min(numbers - saved)
        raise PlanError(
            f"{ARGUMENT} names segment {first} ({names[first]}), which recomputes and saves "
            "nothing; leave it out of one of the two."
        )
    return numbers


def offload_fraction(
    partition: Partition,
    saved: frozenset[int],
    times: Sequence[Timed],
    offload_bytes: Mapping[int, int],
    fraction: float,
) -> frozenset[int]:
    """Offloaded segments: a fraction of every stage's, longest time per copied byte first.

    Args:
        partition: segments by stage.
        saved: segments that save their activations.
        times: of the segments.
        offload_bytes: for each segment, the bytes it would copy for a microbatch.
        fraction: of a stage's saving segments, rounded up to whole segments.
    """

    def seconds_per_byte(index: int) -> float:
        time = times[index]
        return (time.forward_s + time.backward_s) / max(offload_bytes[index], 1)

    chosen: list[int] = []
    for stage in partition.stages:
        own = sorted((i for i in stage if i in saved), key=seconds_per_byte, reverse=True)
        chosen += own[: math.ceil(fraction * len(own) - 1e-9)]
    return frozenset(chosen)
