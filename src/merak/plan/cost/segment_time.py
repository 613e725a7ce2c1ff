"""The estimated time of every segment on a device, from its graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from merak.graph.ir.ir import Kind, Segment
from merak.plan.cost.device import DeviceProfile
from merak.plan.cost.operators import Work, node_work, outputs


@dataclass(frozen=True, slots=True)
class SegmentCost:
    """Cost of a segment for one microbatch.

    Args:
        forward_s: estimated seconds of the forward.
        backward_s: estimated seconds of the backward without recomputation, gradients of the
            parameters added to those of earlier microbatches.
        forward_flops: FLOPs of the forward's matrix products.
        backward_flops: FLOPs of the backward's.
        num_bytes: bytes read and written by both.
        parameter_bytes: bytes of the parameters that it reads.
        boundary_bytes: bytes of the values that cross the cut after the segment.
    """

    forward_s: float
    backward_s: float
    forward_flops: float
    backward_flops: float
    num_bytes: float
    parameter_bytes: int
    boundary_bytes: int


def segment_costs(
    segments: Sequence[Segment], profile: DeviceProfile, *, autocast: torch.dtype | None = None
) -> tuple[SegmentCost, ...]:
    """Estimate the cost of every segment for one microbatch.

    A kernel takes the longer of its computation and its memory traffic, and the device's overhead
    per operator. Segments rewritten for tensor parallelism are costed by their local shapes;
    collectives count as memory traffic alone.

    Args:
        segments: of one model, in order, at microbatch shape.
        profile: the device they run on.
        autocast: the element type that float32 matrix products and attention run in; None for
            that of the graph.

    Returns:
        One cost per segment.
    """
    crossing = _boundary_bytes(segments)
    return tuple(
        _segment_cost(segment, profile, autocast, boundary)
        for segment, boundary in zip(segments, crossing, strict=True)
    )


def work_seconds(work: Work, profile: DeviceProfile, autocast: torch.dtype | None = None) -> float:
    """Seconds of one kernel: the longer of computation and memory traffic, and the overhead."""
    dtype, num_bytes = work.dtype, work.num_bytes
    if autocast is not None and work.flops and dtype == torch.float32:
        dtype, num_bytes = autocast, num_bytes * autocast.itemsize / dtype.itemsize
    compute_s = work.flops / profile.flop_rate(dtype) + work.functions / profile.functions_per_s
    compute_s += work.randoms / profile.randoms_per_s
    overhead_s = work.kernels * profile.overhead_s
    return max(compute_s, num_bytes / profile.memory_bytes_per_s) + overhead_s


def _segment_cost(
    segment: Segment, profile: DeviceProfile, autocast: torch.dtype | None, boundary_bytes: int
) -> SegmentCost:
    works = [node_work(node, profile.device_type) for node in segment.graph.nodes]
    forward = [kernel for work in works for kernel in work.forward]
    backward = [kernel for work in works for kernel in work.backward]
    backward.extend(_gradient_sums(segment.graph))
    return SegmentCost(
        forward_s=sum(work_seconds(kernel, profile, autocast) for kernel in forward),
        backward_s=sum(work_seconds(kernel, profile, autocast) for kernel in backward),
        forward_flops=sum(kernel.flops for kernel in forward),
        backward_flops=sum(kernel.flops for kernel in backward),
        num_bytes=sum(kernel.num_bytes for kernel in (*forward, *backward)),
        parameter_bytes=_parameter_bytes(segment.graph),
        boundary_bytes=boundary_bytes,
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


def _parameter_bytes(graph: fx.Graph) -> int:
    return sum(
        outputs(node)[0].num_bytes
        for node in graph.nodes
        if node.op == "placeholder" and node.meta["kind"] is Kind.PARAMETER
    )


def _boundary_bytes(segments: Sequence[Segment]) -> list[int]:
    """Bytes of the values that cross the cut after every segment."""
    maker = {name: index for index, segment in enumerate(segments) for name in segment.outputs}
    reader: dict[str, tuple[int, int]] = {}
    for index, segment in enumerate(segments):
        for name, num_bytes in _values_read(segment.graph):
            reader[name] = (index, num_bytes)
    crossing = [0] * len(segments)
    for name, (last, num_bytes) in reader.items():
        for index in range(maker[name], last):
            crossing[index] += num_bytes
    return crossing


def _values_read(graph: fx.Graph) -> Iterable[tuple[str, int]]:
    for node in graph.find_nodes(op="placeholder"):
        if node.meta["kind"] is Kind.VALUE:
            yield node.meta["name"], outputs(node)[0].num_bytes
