"""A cluster made from a profile: its hosts, with links and speeds as they were measured.

A device that has a data sheet is the sheet's, and estimates are corrected by what was measured ÷
what the sheet says at that size; between two measured sizes the correction is interpolated, beyond
them it is that of the nearest.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from types import MappingProxyType

import torch

from merak.plan.cluster.cluster import Cluster, Link, Nodes
from merak.plan.cost.calibration import Calibration, Curve, PassSeconds
from merak.plan.cost.device import DeviceProfile, preset, sheet_name
from merak.plan.cost.efficiency import ProductShape
from merak.plan.cost.kernels.kernel_time import work_seconds
from merak.plan.cost.operators import Work
from merak.plan.profile.profile import HOST, NETWORK, Profile

UPDATE_BYTES = 80 / 4
"""Bytes that AdamW's step by lists reads and writes, for a byte of float32 parameters."""


def cluster_of(profile: Profile) -> Cluster:
    """The cluster that a profile was measured on.

    Links of a kind that no rank could measure are endlessly fast: nothing of a job on these hosts
    takes them.

    Args:
        profile: of the hosts.
    """
    device = device_of(profile)
    host_link = _link(profile, HOST)
    nodes = []
    for ranks, count in Counter(ranks for _, ranks in profile.hosts).items():
        network, adapters = _network(profile, ranks)
        nodes.append(Nodes(device, ranks, count, host_link, network, adapters))
    return Cluster(tuple(nodes))


def device_of(profile: Profile) -> DeviceProfile:
    """The speeds of one device, calibrated.

    Args:
        profile: of the device.
    """
    speeds = profile.speeds
    name = sheet_of(profile.machine.device)
    if name is not None:
        overhead_s = speeds.overhead_s if speeds.device_type == "cpu" else preset(name).overhead_s
        speeds = replace(
            preset(name),
            memory_bytes=speeds.memory_bytes,
            overhead_s=overhead_s,
            host_bytes_per_s=speeds.host_bytes_per_s,
            communicator_bytes=speeds.communicator_bytes,
        )
    return replace(speeds, calibration=_calibration(profile, speeds))


def _calibration(profile: Profile, speeds: DeviceProfile) -> Calibration:
    kinds: dict[str, dict[float, PassSeconds]] = {}
    for row in profile.segments:
        kinds.setdefault(row.kind, {})[row.size] = row.seconds
    products = {
        name: Curve(
            tuple(
                (flops, _beyond(s, speeds.overhead_s) / _product_s(name, flops, speeds))
                for flops, s in curve.points
            )
        )
        for name, curve in profile.products
    }
    updates = tuple(
        (size, seconds * speeds.memory_bytes_per_s / (size * UPDATE_BYTES))
        for size, seconds in profile.updates.points
    )
    copies = tuple(
        (size, _beyond(seconds, speeds.overhead_s) * speeds.memory_bytes_per_s / size)
        for size, seconds in profile.copies.points
    )
    return Calibration(
        products=MappingProxyType(products),
        copies=Curve(copies),
        updates=Curve(updates),
        segments=MappingProxyType({row.digest: row.seconds for row in profile.segments}),
        kinds=MappingProxyType(kinds),
    )


def _product_s(name: str, flops: float, speeds: DeviceProfile) -> float:
    """Seconds of a square product by the data sheet, or by the speed of a large one."""
    side = round((flops / 2) ** (1 / 3))
    dtype = getattr(torch, name)
    num_bytes = 3 * side * side * dtype.itemsize
    work = Work(num_bytes, flops, dtype, shape=ProductShape(side, side, side))
    return work_seconds(work, speeds) - speeds.overhead_s


def _beyond(seconds: float, overhead_s: float) -> float:
    """Seconds of an operator beyond the overhead, which estimates add by themselves."""
    return max(seconds - overhead_s, 0.05 * seconds)


def sheet_of(device: str) -> str | None:
    """Name of the data sheet of a device that its driver names; None where there is none.

    Args:
        device: such as "NVIDIA H100 80GB HBM3".
    """
    words = re.findall(r"[a-z0-9]+", device.lower())
    words = [word for word in words if word not in ("nvidia", "amd", "geforce", "instinct")]
    for number in range(len(words), 0, -1):
        found = sheet_name("-".join(words[:number]))
        if found is not None:
            return found
    return None


# Links


def _link(profile: Profile, kind: str) -> Link:
    """The link of a kind, while all ranks of a host send."""
    rows = [own for own in profile.links if own.kind == kind]
    if not rows:
        return Link(kind, 0.0, float("inf"))
    latency_s, bytes_per_s = fit_link(max(rows, key=lambda own: own.senders).seconds)
    measured = tuple(o for o in profile.collectives if (o.hosts > 1) == (kind == NETWORK))
    slows = dict(profile.interference).get(kind)
    return Link(kind, latency_s, bytes_per_s, measured=measured, interference=slows)


def _network(profile: Profile, ranks: int) -> tuple[Link, int | None]:
    """The network of one device, and adapters of a node: how many senders it takes at full rate."""
    network = _link(profile, NETWORK)
    rows = {own.senders: own.seconds for own in profile.links if own.kind == NETWORK}
    if not rows or max(rows) == min(rows):
        return network, None
    alone, shared = (fit_link(rows[senders])[1] for senders in (min(rows), max(rows)))
    return network, max(1, min(ranks, round(ranks * shared / alone)))


def fit_link(seconds: Curve) -> tuple[float, float]:
    """Latency and bytes per second of the line that fits measured messages best.

    Relative errors count, so that a fast small message matters as much as a slow large one.

    Args:
        seconds: of a message, by its bytes.
    """
    points = seconds.points
    if len(points) == 1:
        return 0.0, points[0][0] / points[0][1]
    weights = [1 / value**2 for _, value in points]
    total = sum(weights)
    mean_size = _mean(weights, (size for size, _ in points), total)
    mean_s = _mean(weights, (value for _, value in points), total)
    spread = sum(w * (size - mean_size) ** 2 for w, (size, _) in zip(weights, points, strict=True))
    joint = sum(
        w * (size - mean_size) * (value - mean_s)
        for w, (size, value) in zip(weights, points, strict=True)
    )
    slope = joint / spread
    latency_s = mean_s - slope * mean_size
    if slope <= 0 or latency_s < 0:
        largest, longest = points[-1]
        latency_s = min(value for _, value in points)
        slope = max(longest - latency_s, 0.1 * longest) / largest
    return latency_s, 1 / slope


def _mean(weights: Iterable[float], values: Iterable[float], total: float) -> float:
    return sum(w * value for w, value in zip(weights, values)) / total
