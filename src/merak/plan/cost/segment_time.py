"""The estimated time of every segment on a device, from its graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import fx

from merak.graph.ir.ir import Kind, Segment
from merak.plan.cost.device import DeviceProfile
from merak.plan.cost.efficiency import (
    AttentionShape,
    ProductShape,
    attention_fraction,
    product_fraction,
)
from merak.plan.cost.measured_times import SegmentTimes
from merak.plan.cost.operators import Work, node_work, outputs


def segment_costs(segments: Sequence[Segment], profile: DeviceProfile) -> tuple[SegmentTimes, ...]:
    """Estimate the times of every segment for one microbatch.

    A kernel takes the longer of its computation and its memory traffic, and the device's overhead
    per operator. Segments rewritten for tensor parallelism are costed by their local shapes;
    collectives count as memory traffic alone. Gradients of parameters are added to those of earlier
    microbatches.

    Args:
        segments: of one model, in order, at microbatch shape.
        profile: the device they run on.
    """
    return tuple(_segment_times(segment, profile) for segment in segments)


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


def _segment_times(segment: Segment, profile: DeviceProfile) -> SegmentTimes:
    works = [node_work(node, profile.device_type) for node in segment.graph.nodes]
    forward = [kernel for work in works for kernel in work.forward]
    backward = [kernel for work in works for kernel in work.backward]
    backward.extend(_gradient_sums(segment.graph))
    return SegmentTimes(
        segment.name,
        forward_s=works_seconds(forward, profile),
        backward_s=works_seconds(backward, profile),
    )


def _gradient_sums(graph: fx.Graph) -> Iterator[Work]:
    """Work of adding a value's gradients from several readers, and from earlier microbatches."""
    for node in graph.nodes:
        found = outputs(node)
        if len(found) != 1 or not found[0].requires_grad:
            continue
        num_gradients = sum(_gives_gradient(user) for user in node.users)
        earlier = num_gradients > 0 and node.meta.get("kind") is Kind.PARAMETER
        yield from [Work(3 * found[0].num_bytes)] * (num_gradients - 1 + earlier)


def _gives_gradient(user: fx.Node) -> bool:
    return user.op != "output" and any(meta.requires_grad for meta in outputs(user))
