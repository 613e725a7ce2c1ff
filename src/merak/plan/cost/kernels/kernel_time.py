"""Estimated seconds of kernels on a device."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from merak.plan.cost.device import DeviceProfile
from merak.plan.cost.efficiency import (
    AttentionShape,
    ProductShape,
    attention_fraction,
    product_fraction,
)
from merak.plan.cost.operators import Work, node_work


def operator_seconds(graph: fx.Graph, profile: DeviceProfile) -> tuple[float, ...]:
    """Seconds of each node of a graph in a forward."""
    works = (node_work(node, profile.device_type).forward for node in graph.nodes)
    return tuple(sum(work_seconds(kernel, profile) for kernel in work) for work in works)


def work_seconds(work: Work, profile: DeviceProfile) -> float:
    """Seconds of one kernel: the longer of computation and memory traffic, and the overhead."""
    compute_s = work.flops / (profile.flop_rate(work.dtype) * _achieved(work, profile))
    if profile.calibration is not None and isinstance(work.shape, ProductShape):
        compute_s *= profile.calibration.product(work.dtype, work.flops / work.shape.batch)
    if profile.efficiency is None or not isinstance(work.shape, AttentionShape):  # has them in it
        compute_s += work.functions / profile.functions_per_s
    compute_s += work.randoms / profile.randoms_per_s
    overhead_s = work.kernels * profile.overhead_s
    memory_s = work.num_bytes / profile.memory_bytes_per_s
    if profile.calibration is not None:
        memory_s *= profile.calibration.copy(work.num_bytes)
    return max(compute_s, memory_s) + overhead_s


def works_seconds(works: Sequence[Work], profile: DeviceProfile) -> float:
    """Seconds of kernels one after another, or of their launches by the host if those take longer.

    The host runs ahead of a GPU, so launches are hidden where the kernels are longer on average.
    """
    device_s = sum(work_seconds(work, profile) for work in works)
    if profile.efficiency is None:
        return device_s
    return max(device_s, profile.efficiency.launch_s * sum(work.kernels for work in works))


def _achieved(work: Work, profile: DeviceProfile) -> float:
    """Rate of a product ÷ that of a large one; 1 where the profile has no curve."""
    curve = profile.efficiency
    if curve is None or work.shape is None:
        return 1.0
    if isinstance(work.shape, ProductShape):
        return product_fraction(work.shape, curve, profile.multiprocessors)
    return attention_fraction(work.shape, curve, profile.multiprocessors) / curve.product
