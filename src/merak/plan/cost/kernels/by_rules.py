"""Times of segments by rules alone, for jobs that nobody plans: no joint graphs, no links."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from merak.graph.ir.ir import Segment
from merak.plan.cost.device import DeviceProfile
from merak.plan.cost.kernels.kernel_time import works_seconds
from merak.plan.cost.kernels.segment_kernels import Kernel, KernelChoice, segment_kernels
from merak.plan.cost.measured_times import SegmentTimes
from merak.plan.cost.operators import Work


def segment_costs(segments: Sequence[Segment], profile: DeviceProfile) -> tuple[SegmentTimes, ...]:
    """Estimate the times of every segment for one microbatch.

    Segments rewritten for tensor parallelism are costed by their local shapes; collectives count
    as memory traffic alone. Gradients of parameters are added to those of earlier microbatches.

    Args:
        segments: of one model, in order, at microbatch shape.
        profile: the device they run on.
    """
    choice = KernelChoice()
    kernels = [segment_kernels(own.graph, choice, profile.device_type) for own in segments]
    return tuple(
        SegmentTimes(
            segment.name,
            forward_s=works_seconds([*_works(own.forward)], profile),
            backward_s=works_seconds([*_works(own.backward)], profile),
        )
        for segment, own in zip(segments, kernels, strict=True)
    )


def _works(kernels: Sequence[Kernel]) -> Iterator[Work]:
    """Of each kernel; a collective's is the traffic of what it sends."""
    for kernel in kernels:
        if kernel.work is not None:
            yield kernel.work
        elif kernel.collective is not None:
            yield Work(kernel.collective[1])
