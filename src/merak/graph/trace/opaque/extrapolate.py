"""Costs of a long loop, extrapolated from short sequences.

A loop over 4,096 tokens calls a hundred thousand operators, and takes a minute even on meta
tensors. Its cost and its outputs' sizes are polynomials of the sequence's length where every pass
does the same: five short lengths show whether they are, and which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, replace

import sympy  # type: ignore[import-untyped]

from merak.core.tensor_meta import TensorMeta
from merak.graph.trace.opaque.operator import CallCost, LoopCost
from merak.graph.trace.opaque.probe import ProbeResult

LENGTHS = (16, 32, 48, 64, 80)
"""Evenly spaced; what works in chunks of 64 or fewer tokens is no polynomial over these."""

_LENGTH = sympy.Symbol("length")

Measure = Callable[[Sequence[TensorMeta]], ProbeResult]
"""Runs the loop on operands of some shapes."""


def extrapolated(
    measure: Measure, metas: Sequence[TensorMeta], length: int | None = None
) -> ProbeResult | None:
    """Extrapolate a loop's result and cost to a long sequence.

    Args:
        measure: runs it.
        metas: metadata of its operands.
        length: the size that is the sequence's length; None to find it by trying.

    Returns:
        The result of a run at full length; None where no size is the length, or the cost is no
        polynomial of it.
    """
    known = {size for meta in metas for size in meta.shape} if length is None else {length}
    for size in sorted(size for size in known if size > 2 * LENGTHS[-1]):
        found = _at_lengths(measure, metas, size)
        if found is not None:
            made = _polynomial(found, size)
            if made is not None:
                return made
    return None


def _at_lengths(
    measure: Measure, metas: Sequence[TensorMeta], length: int
) -> list[ProbeResult] | None:
    found: list[ProbeResult] = []
    for short in LENGTHS:
        try:
            found.append(measure([resized(meta, length, short) for meta in metas]))
        except Exception:  # whatever the code raises for other shapes
            return None
        if len(found) == 2 and _kernels(found[1]) - _kernels(found[0]) < LENGTHS[1] - LENGTHS[0]:
            return None  # fewer passes than the size says
    return found


def resized(meta: TensorMeta, length: int, short: int) -> TensorMeta:
    """Metadata of an operand of a loop over a shorter sequence.

    Args:
        meta: of the operand.
        length: the sequence's length; every dim of this size becomes a short one.
        short: the shorter length.
    """
    return replace(meta, shape=tuple(short if size == length else size for size in meta.shape))


def _kernels(found: ProbeResult) -> int:
    assert found.cost.loop is not None
    return found.cost.loop.kernels[0]


def _polynomial(found: Sequence[ProbeResult], length: int) -> ProbeResult | None:
    fixed = {
        (repr(f.result), f.written, f.aliases, f.always_used, len(f.cost.outputs)) for f in found
    }
    if len(fixed) > 1:
        return None
    numbers = [
        _value(values, length) for values in zip(*(_numbers(f.cost) for f in found), strict=True)
    ]
    known = [number for number in numbers if number is not None]
    if len(known) < len(numbers):
        return None
    saved_bytes, flops, *rest = known
    costs, sizes = rest[:7], iter(rest[7:])
    outputs = tuple(
        replace(meta, shape=tuple(next(sizes) for _ in meta.shape))
        for meta in found[-1].cost.outputs
    )
    loop = LoopCost(costs[0], costs[1], costs[2], (costs[3], costs[4]), (costs[5], costs[6]))
    return replace(found[-1], cost=CallCost(outputs, saved_bytes, flops, loop))


def _numbers(cost: CallCost) -> list[int]:
    assert cost.loop is not None
    *peaks, kernels, traffic = astuple(cost.loop)
    sizes = [size for meta in cost.outputs for size in meta.shape]
    return [cost.saved_bytes, cost.flops, *peaks, *kernels, *traffic, *sizes]


def _value(values: Sequence[int], length: int) -> int | None:
    """The value at a length of the polynomial through some; None if it is of too high a degree."""
    polynomial = sympy.interpolate(list(zip(LENGTHS, values, strict=True)), _LENGTH)
    found = polynomial.subs(_LENGTH, length)
    is_low = sympy.degree(polynomial, _LENGTH) < len(values) - 1
    return int(found) if is_low and found.is_integer and found >= 0 else None
