"""A profile with hand-made numbers."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from merak.plan.cost.calibration import Curve, PassSeconds
from merak.plan.cost.device import DeviceProfile
from merak.plan.profile.profile import (
    HOST,
    NETWORK,
    CollectiveTimes,
    LinkTimes,
    Machine,
    Profile,
    SegmentRow,
)

SPEEDS = DeviceProfile(
    name="Some CPU",
    device_type="cpu",
    flops_per_s=MappingProxyType({"float32": 1e11}),
    memory_bytes_per_s=1e10,
    functions_per_s=1e9,
    randoms_per_s=1e9,
    overhead_s=0.0,
    host_bytes_per_s=1e10,
)
MACHINE = Machine("Some CPU", "cpu", "2.13.0", "1.0", "gloo")


def line(latency_s: float, bytes_per_s: float) -> Curve:
    """Seconds of messages over a link."""
    return Curve(tuple((n, latency_s + n / bytes_per_s) for n in (1e3, 1e5, 1e7)))


def segment(digest: str, kind: str, size: float, scale: float) -> SegmentRow:
    seconds = PassSeconds(scale, scale, 2 * scale, scale, scale)
    return SegmentRow("Model", "block", digest, kind, size, 1, 1, seconds)


def profile(**changes: Any) -> Profile:
    """Two hosts of two ranks; the network takes one sender at full rate."""
    fields: dict[str, Any] = {
        "machine": MACHINE,
        "hosts": (("a", 2), ("b", 2)),
        "speeds": SPEEDS,
        "products": (("float32", Curve(((2e6, 4e-5), (2e9, 2e-2)))),),
        "copies": Curve(((1e4, 2e-6), (1e8, 1e-2))),
        "functions": Curve(((1e6, 1e-3),)),
        "updates": Curve(((1e6, 4e-3),)),
        "links": (
            LinkTimes(HOST, 2, line(1e-5, 4e9)),
            LinkTimes(NETWORK, 1, line(1e-4, 1e8)),
            LinkTimes(NETWORK, 2, line(1e-4, 5e7)),
        ),
        "collectives": (CollectiveTimes("all_reduce", 2, 1, line(2e-5, 2e9)),),
        "interference": ((HOST, 0.3),),
        "segments": (segment("one", "kind", 1e6, 1e-3), segment("two", "kind", 4e6, 4e-3)),
    }
    return Profile(**{**fields, **changes})
