"""Measured figures of a device, with which the estimates of its data sheet are corrected."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from types import MappingProxyType

import torch


@dataclass(frozen=True, slots=True)
class Curve:
    """Measured values by size. Between two sizes, both logarithms are interpolated.

    Args:
        points: sizes and values, all above 0; sizes rise.
    """

    points: tuple[tuple[float, float], ...]

    def at(self, size: float) -> float:
        """The value at a size; outside the measured sizes that of the nearest one.

        Args:
            size: in the units of `points`.
        """
        sizes = [own for own, _ in self.points]
        place = bisect_left(sizes, size)
        if place == len(sizes) or (place == 0) or sizes[place] == size:
            return self.points[min(place, len(sizes) - 1)][1]
        (low, first), (high, last) = self.points[place - 1 : place + 1]
        part = math.log(size / low) / math.log(high / low)
        return math.exp(math.log(first) + part * math.log(last / first))

    def times(self, factor: float) -> Curve:
        """The curve of values that are so many times as large."""
        return Curve(tuple((size, factor * value) for size, value in self.points))

    def seconds_at(self, size: float) -> float:
        """Seconds at a size, where the values are seconds of so much work.

        Beyond the largest size, work takes as long per unit as there; below the smallest, as long
        as the smallest, for that is overhead.

        Args:
            size: in the units of `points`.
        """
        largest = self.points[-1][0]
        return self.at(size) * max(1.0, size / largest)


def curve_of(points: Sequence[tuple[float, float]]) -> Curve:
    """A curve of points in any order; of several at one size, the last."""
    return Curve(tuple(sorted(dict(points).items())))


@dataclass(frozen=True, slots=True)
class PassSeconds:
    """Seconds of the passes of a segment or a stage for one microbatch.

    Args:
        forward_s: of the forward.
        recompute_s: of computing its activations again.
        backward_s: of the backward without recomputation.
        input_gradient_s: of a split backward's I.
        weight_gradient_s: of its W.
    """

    forward_s: float
    recompute_s: float
    backward_s: float
    input_gradient_s: float
    weight_gradient_s: float

    def times(self, factor: float) -> PassSeconds:
        """The seconds of passes that take so many times as long."""
        return PassSeconds(*(factor * seconds for seconds in astuple(self)))

    def plus(self, *others: PassSeconds) -> PassSeconds:
        """The seconds of passes together with those of others."""
        every = map(astuple, (self, *others))
        return PassSeconds(*(sum(seconds) for seconds in zip(*every, strict=True)))


@dataclass(frozen=True, slots=True)
class Calibration:
    """Corrections of a device's estimated seconds, as factors by size.

    Args:
        products: of matrix products by FLOPs, by the name of the element type.
        copies: of the memory traffic of kernels by bytes; None for none.
        updates: of the optimizer's step by bytes of parameters; None for none.
        segments: measured segments, by `segment_digest`.
        kinds: measured segments of equal operators and parameters, by `segment_kind`: bytes of all
            values, and the seconds of each pass.
    """

    products: Mapping[str, Curve] = field(default_factory=lambda: MappingProxyType({}))
    copies: Curve | None = None
    updates: Curve | None = None
    segments: Mapping[str, PassSeconds] = field(default_factory=lambda: MappingProxyType({}))
    kinds: Mapping[str, Mapping[float, PassSeconds]] = field(
        default_factory=lambda: MappingProxyType({})
    )

    def product(self, dtype: torch.dtype, flops: float) -> float:
        """Factor of the seconds of a matrix product.

        Args:
            dtype: its element type; one that was not measured has the factor of float32.
            flops: of the product.
        """
        name = str(dtype).removeprefix("torch.")
        curve = self.products.get(name, self.products.get("float32"))
        return 1.0 if curve is None else curve.at(flops)

    def copy(self, num_bytes: float) -> float:
        """Factor of the seconds of memory traffic."""
        return 1.0 if self.copies is None else self.copies.at(num_bytes)

    def update(self, num_bytes: float) -> float:
        """Factor of the seconds of the optimizer's step."""
        return 1.0 if self.updates is None else self.updates.at(num_bytes)

    def slowed(self, factor: float, update_factor: float) -> Calibration:
        """The calibration of a device whose rates are so many times lower.

        Args:
            factor: of everything but updates, which measured segments take longer, too.
            update_factor: of the optimizer's step.
        """
        kinds = {
            name: {size: own.times(factor) for size, own in rows.items()}
            for name, rows in self.kinds.items()
        }
        segments = {name: own.times(factor) for name, own in self.segments.items()}
        updates = self.updates or Curve(((1.0, 1.0),))
        return replace(
            self,
            updates=updates.times(update_factor / factor),
            segments=MappingProxyType(segments),
            kinds=MappingProxyType(kinds),
        )

    def segment(self, digest: str, kind: str, size: float) -> PassSeconds | None:
        """Measured seconds of a segment; None where neither it nor its kind was measured.

        Args:
            digest: `segment_digest` of its graph.
            kind: `segment_kind` of its graph.
            size: bytes of all values of its graph.
        """
        if digest in self.segments:
            return self.segments[digest]
        known = self.kinds.get(kind)
        if not known:
            return None
        found = {
            name: curve_of([(own, getattr(seconds, name)) for own, seconds in known.items()])
            for name in PassSeconds.__slots__
        }
        return PassSeconds(**{name: _seconds(curve, size) for name, curve in found.items()})


def _seconds(curve: Curve, size: float) -> float:
    """Seconds of a pass; 0 where it does nothing at some size."""
    return 0.0 if any(value <= 0 for _, value in curve.points) else curve.seconds_at(size)
