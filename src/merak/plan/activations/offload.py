"""Which segments keep their activations in host memory instead of the device's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from merak.core.errors import PlanError
from merak.plan.balance import Timed
from merak.plan.partition import Partition
from merak.plan.recompute_spec import Mode, Recompute, RecomputeSpec, parse_recompute

ARGUMENT = "offload_activations"
"""What users call it."""

NOTHING = RecomputeSpec(Mode.SHARE, share=0.0)
"""Nothing waits in host memory."""


def parse_offload(value: Recompute) -> RecomputeSpec:
    """Read what a user says about activations in host memory.

    Args:
        value: None or "off" for none; "full" for all that are kept; the share of every stage's
            segments that keep their activations, 0 to 1; segments by number or name, as a list or
            as a text with commas; or "auto" for as few as the memory needs.

    Raises:
        PlanError: it is none of these.
    """
    if value is None:
        return NOTHING
    try:
        wish = parse_recompute(value)
    except PlanError:
        wish = RecomputeSpec(Mode.SELECTIVE)
    if wish.mode is Mode.SELECTIVE:
        raise PlanError(
            f"{ARGUMENT}={value!r} is no choice of activations to keep in host memory; use 'off', "
            "'full', 'auto', a share of every stage's segments (0 to 1), or segments such as "
            "'3,4,7'."
        )
    return wish


def listed(wish: RecomputeSpec, names: Sequence[str], kept: frozenset[int]) -> frozenset[int]:
    """The segments that a user has listed.

    Args:
        wish: of mode `SEGMENTS`.
        names: of the model's segments.
        kept: those that keep their activations.

    Raises:
        PlanError: there is no such segment, or it recomputes.
    """
    numbers = wish.numbers(names, ARGUMENT)
    if numbers - kept:
        first = min(numbers - kept)
        raise PlanError(
            f"{ARGUMENT} names segment {first} ({names[first]}), which recomputes and has nothing "
            "to keep; leave it out of one of the two."
        )
    return numbers


def offload_share(
    partition: Partition,
    kept: frozenset[int],
    times: Sequence[Timed],
    moved_bytes: Mapping[int, int],
    share: float,
) -> frozenset[int]:
    """Let a share of every stage's kept segments wait in host memory, what hides best first.

    Args:
        partition: segments by stage.
        kept: segments that keep their activations.
        times: of the segments.
        moved_bytes: what each would move for a microbatch.
        share: of a stage's kept segments; a part of a segment counts as a whole one.
    """

    def seconds_per_byte(index: int) -> float:
        time = times[index]
        return (time.forward_s + time.backward_s) / max(moved_bytes[index], 1)

    chosen: list[int] = []
    for stage in partition.stages:
        own = sorted((i for i in stage if i in kept), key=seconds_per_byte, reverse=True)
        chosen += own[: math.ceil(share * len(own) - 1e-9)]
    return frozenset(chosen)
