"""Fractions of a device's peaks that its operators achieve, by operator and size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Fractions of the peak rates that operators achieve on a generation of devices.

    Args:
        product: of the peak FLOPs, in matrix products of many whole tiles and endless depth, as
            benchmarks of a few milliseconds find it.
        sustained: rate of products and attention in training ÷ that in such a benchmark: under
            long load, the power limit lowers the clock.
        product_depth: depth (k) at which a tile's start and end take as long as its sums.
        tile: side of the square of results that one multiprocessor computes at a time.
        attention_forward: of the peak FLOPs, in fused attention forward, heads of 128 features.
        attention_backward: the same of its backward.
        attention_small_head: factor of the forward for heads of 64 features and fewer.
        attention_small_head_backward: the same of the backward.
        attention_length: keys at which the start and end of a row of tiles take as long as its
            sums, forward.
        copy: of the memory's bandwidth, in a large kernel that is bound by it.
        function: of the peak FLOPs of float32, in functions such as gelu or exp.
        host: of the host link's bandwidth, in copies both ways at once.
        kernel_s: seconds from the end of one kernel's work to the start of the next one's.
        launch_s: seconds of the host to start an operator, hidden while the device has work.
        source: of the figures.
    """

    product: float
    sustained: float
    product_depth: float
    tile: int
    attention_forward: float
    attention_backward: float
    attention_small_head: float
    attention_small_head_backward: float
    attention_length: float
    copy: float
    function: float
    host: float
    kernel_s: float
    launch_s: float
    source: str


@dataclass(frozen=True, slots=True)
class ProductShape:
    """Shape of a matrix product of (m, k) by (k, n), several times.

    Args:
        m: rows of the result.
        n: columns of the result.
        k: depth of the sums.
        batch: number of such products.
    """

    m: int
    n: int
    k: int
    batch: int = 1


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Shape of fused attention.

    Args:
        head: features of a head.
        keys: length of a row of scores.
        rows: rows of scores, of all heads and samples.
        is_causal: whether half of the scores are skipped.
        is_backward: whether it is the backward.
    """

    head: int
    keys: int
    rows: int
    is_causal: bool
    is_backward: bool


def product_fraction(shape: ProductShape, curve: Efficiency, multiprocessors: int) -> float:
    """Rate of a matrix product ÷ that of an endless one.

    Multiprocessors compute a tile each, so results that fill no whole number of tiles, and tiles
    that fill no whole number of rounds ("waves"), leave some idle. A product with few tiles is cut
    along its depth. The best of a square tile and one of twice its width is taken.

    Source: NVIDIA, Matrix Multiplication Background User's Guide (DU-09799-001), 2.2 and 3.1, 3.2.
    """
    return max(
        _tiled_fraction(shape, curve, multiprocessors, width) for width in (curve.tile, _WIDE)
    )


_WIDE = 256


def _tiled_fraction(shape: ProductShape, curve: Efficiency, units: int, width: int) -> float:
    best = 0.0
    for rows, columns in ((shape.m, shape.n), (shape.n, shape.m)):
        num_tiles = shape.batch * math.ceil(rows / curve.tile) * math.ceil(columns / width)
        filled = shape.batch * rows * columns / (num_tiles * curve.tile * width)
        depth, splits = float(shape.k), 1
        if units and num_tiles < units:
            splits = max(1, min(units // num_tiles, shape.k // _LEAST_DEPTH))
            depth /= splits
        waves = num_tiles * splits / units if units else 1.0
        busy = waves / math.ceil(waves) if units else 1.0
        best = max(best, filled * busy * depth / (depth + curve.product_depth))
    return best


_LEAST_DEPTH = 512
"""Of a piece of a product that is cut along its depth."""


def attention_fraction(shape: AttentionShape, curve: Efficiency, multiprocessors: int) -> float:
    """Fraction of the peak FLOPs that fused attention achieves.

    Source of the shape of the curve: figures 5 and 6 of FlashAttention-3, arXiv 2407.08608, with
    FlashAttention-2 and cuDNN on an H100. A backward needs three times the length of a forward; a
    causal row counts as a third of its keys, and reaches 0.9 of a whole one's rate at most.
    """
    top, length = curve.attention_forward, curve.attention_length
    small = curve.attention_small_head
    if shape.is_backward:
        top, length = curve.attention_backward, _BACKWARD_LENGTH * curve.attention_length
        small = curve.attention_small_head_backward
    if shape.head <= _SMALL_HEAD:
        top *= small
    keys = float(shape.keys)
    if shape.is_causal:
        top, keys = _CAUSAL_TOP * top, keys / _CAUSAL_KEYS
    fraction = top * keys / (keys + length)
    blocks = math.ceil(shape.rows / _ROW_BLOCK)
    return fraction * min(1.0, blocks / multiprocessors) if multiprocessors else fraction


_BACKWARD_LENGTH = 3.0
_CAUSAL_TOP = 0.9
_CAUSAL_KEYS = 3.0
_SMALL_HEAD = 64
_ROW_BLOCK = 128
"""Rows of scores that one multiprocessor computes at a time."""


def efficiency_from(content: Mapping[str, Any]) -> Efficiency:
    """The efficiency of a mapping of its fields.

    Raises:
        ValueError: a field is missing, unknown, or of a wrong kind; the message says which.
    """
    names = [part.name for part in fields(Efficiency)]
    for name in (*names, *content):
        if name not in content or name not in names:
            raise ValueError(f"efficiency has the fields {names}, and {name!r} is not one of both")
    for name, value in content.items():
        if name == "source":
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
            raise ValueError(f"efficiency.{name}={value} is no number of 0 or more")
        if value == 0 and name not in _MAY_BE_ZERO:
            raise ValueError(f"efficiency.{name}=0 is no fraction, which is above 0")
    return Efficiency(**content)


_MAY_BE_ZERO = ("product_depth", "attention_length", "kernel_s", "launch_s")
