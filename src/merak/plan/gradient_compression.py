"""Compressed gradient reductions: their kinds, the bytes that each sends, and the state it holds.

Sources: arXiv 1905.13727 (PowerSGD), algorithm 1; Seide et al., "1-bit stochastic gradient descent"
(Interspeech 2014), section 2, and arXiv 2102.02888 (1-bit Adam), section 3, for signs with error
feedback; arXiv 1704.05021 (TopK); arXiv 1712.01887 (Deep Gradient Compression), section 3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

COMPRESSIONS = ("off", "fp16", "bf16", "powersgd", "1bit", "topk", "dgc")
"""Values of the option `gradient_compression`."""

AUTO = "auto"
"""A further value: the kind that is chosen with the plan, by its price."""

CHOSEN_BY_PRICE = ("bf16", "powersgd")
"""Kinds that it may be: those that suit every optimizer."""

KEPT: Mapping[str, tuple[str, ...]] = {
    "off": (),
    "fp16": (),
    "bf16": (),
    "powersgd": ("error",),
    "1bit": ("error", "served"),
    "topk": ("error",),
    "dgc": ("error", "velocity"),
}
"""What a replica keeps from step to step: what is left out of its own gradients, and of the sums of
the rows that it serves; the momentum of its own gradients."""

WITH_ERROR_FEEDBACK = frozenset(kind for kind, kept in KEPT.items() if kept)
"""Kinds that add to a gradient what compression has left out of the one before."""

USUAL_RANK = 4
"""Columns of the two factors that PowerSGD sends of a matrix, unless it is told others."""

LEAST_RATE = 2
"""A matrix whose factors are not smaller by more than this factor is sent whole."""

LARGEST = frozenset({"topk", "dgc"})
"""Kinds that send the largest elements, which replicas gather."""

USUAL_FRACTION = 0.01
"""Of the elements of a gradient that these send, unless they are told another."""

PLACE_BYTES = 4
"""Bytes of the place of an element."""

SCALE_BYTES = 4
"""Bytes of the float32 scale that goes with the signs of a row."""


def powersgd_rank(shape: Sequence[int], most: int = USUAL_RANK) -> int:
    """Columns of the factors of a gradient; 0 for one that is sent whole.

    Args:
        shape: of the gradient; dimensions after the first count as columns of one matrix.
        most: columns of the factors of large matrices, the option `powersgd_rank`.
    """
    if len(shape) < 2:
        return 0
    rows, columns = shape[0], math.prod(shape[1:])
    rank = min(rows, columns, most)
    return rank if (rows + columns) * rank * LEAST_RATE < rows * columns else 0


def num_scales(shape: Sequence[int]) -> int:
    """Rows of a gradient, each of whose signs have a scale of their own; 1 for a vector.

    Args:
        shape: of the gradient; dimensions after the first count as columns.
    """
    return shape[0] if len(shape) > 1 else 1


def num_largest(count: int, fraction: float = USUAL_FRACTION) -> int:
    """Elements of a gradient that are sent, at least one.

    Args:
        count: of its elements.
        fraction: the option `topk_fraction`.
    """
    return min(count, max(1, math.ceil(count * fraction)))


def compressed_bytes(
    kind: str,
    shape: Sequence[int],
    item_bytes: int,
    most_rank: int = USUAL_RANK,
    fraction: float = USUAL_FRACTION,
) -> int:
    """Bytes of one replica's compressed gradient of a parameter.

    Args:
        kind: one of `COMPRESSIONS`.
        shape: of the gradient.
        item_bytes: of one of its elements.
        most_rank: as `most` of `powersgd_rank`.
        fraction: as of `num_largest`.
    """
    count = math.prod(shape)
    if kind in ("fp16", "bf16"):
        return 2 * count
    if kind == "1bit":
        return math.ceil(count / 8) + num_scales(shape) * SCALE_BYTES if count else 0
    if kind in LARGEST:
        return num_largest(count, fraction) * (item_bytes + PLACE_BYTES)
    if kind == "powersgd" and (rank := powersgd_rank(shape, most_rank)):
        return (shape[0] + count // shape[0]) * rank * item_bytes
    return count * item_bytes


def feedback_bytes(kind: str, gradient_bytes: int, replicas: int) -> int:
    """Bytes of the error feedback of some gradients, of this step and of the one before.

    The one before stays until the step is known not to be skipped.

    Args:
        kind: one of `COMPRESSIONS`.
        gradient_bytes: of the uncompressed gradients.
        replicas: that reduce them.
    """
    each = {"served": math.ceil(gradient_bytes / replicas)}
    return 2 * sum(each.get(what, gradient_bytes) for what in KEPT[kind])
