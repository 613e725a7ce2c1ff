"""Seconds of a workload's segments on a device: computation apart from collectives over tp and cp.

Segments with equal graphs, such as the blocks of a model, are priced once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from torch import fx

from merak.core.mesh import pretended
from merak.core.tensor_meta import TensorMeta
from merak.plan.cluster.cluster import Cluster
from merak.plan.cluster.collectives import collective_seconds
from merak.plan.cluster.groups import Groups, groups_of
from merak.plan.cost.device import DeviceProfile
from merak.plan.cost.joint_operators import JointParts
from merak.plan.cost.kernels.kernel_time import work_seconds
from merak.plan.cost.kernels.segment_kernels import (
    Kernel,
    KernelChoice,
    Operators,
    SegmentKernels,
    joint_kernels,
    segment_kernels,
)
from merak.plan.cost.operators import node_work
from merak.plan.cost.overlap import INTERFERENCE, Step
from merak.plan.cost.segment_digest import segment_digest, segment_kind, segment_size
from merak.plan.price.candidate import Candidate, Form
from merak.plan.price.workload import Workload

Steps = tuple[Step, ...]
"""Seconds of computation, and of the collective after it, in order."""


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward or backward of a segment, or a part of one.

    Args:
        steps: of the device: seconds of every kernel's computation, and of every collective.
        host_s: seconds in which the host launches them, ahead of the device.
    """

    steps: Steps
    host_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of a pass whose computation waits for every collective."""
        return max(self.host_s, steps_seconds(self.steps))


def steps_seconds(steps: Iterable[Step]) -> float:
    """Seconds of a device whose computation waits for every collective."""
    return sum(compute_s + collective_s for compute_s, collective_s in steps)


@dataclass(frozen=True, slots=True, eq=False)
class SegmentPrice:
    """Seconds of a segment for one microbatch.

    Args:
        graph: of the segment that was priced, which this one is equal to.
        forward: of the forward.
        backward: of the backward without recomputation.
        input_gradient: of a split backward's I.
        weight_gradient: of its W.
        launch_s: of the forward and the backward, overheads of kernels.
        kernels: what runs.
        seconds: of every kernel of the forward, as estimated.
        host_s: of a kernel's launch.
        recompute_s: of a recomputation, where it was measured.
    """

    graph: fx.Graph
    forward: Pass
    backward: Pass
    input_gradient: Pass
    weight_gradient: Pass
    launch_s: float
    kernels: SegmentKernels
    seconds: Steps
    host_s: float = 0.0
    recompute_s: float | None = None
    forward_s: float = field(init=False)
    """Seconds of a forward."""
    backward_s: float = field(init=False)
    """Seconds of a backward without recomputation."""
    _recomputations: dict[tuple[frozenset[int] | None, ...], Pass] = field(
        init=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        """Sum the seconds up, once for all that ask."""
        object.__setattr__(self, "forward_s", self.forward.seconds)
        object.__setattr__(self, "backward_s", self.backward.seconds)

    @property
    def parameters(self) -> Mapping[str, TensorMeta]:
        """The rank's shard of every parameter of the segment that was priced, by name."""
        return self.kernels.parameters

    def recompute_seconds(
        self, recomputed: frozenset[int] | None, most: frozenset[int] | None
    ) -> float:
        """Seconds of a recomputation; arguments as of `recompute`."""
        return self.recompute(recomputed, most).seconds

    def recompute(
        self, recomputed: frozenset[int] | None, most: frozenset[int] | None = None
    ) -> Pass:
        """A recomputation.

        Args:
            recomputed: as of `SegmentMemory`.
            most: the same where nothing is kept for it, which `recompute_s` is of.
        """
        key = (recomputed, most)
        if key not in self._recomputations:
            self._recomputations[key] = self._recompute(recomputed, most)
        return self._recomputations[key]

    def _recompute(self, recomputed: frozenset[int] | None, most: frozenset[int] | None) -> Pass:
        kept = self._again(recomputed)
        found = _launched(kept, self.host_s)
        if self.recompute_s is None:
            return found
        most_s = sum(compute_s for _, (compute_s, _) in self._again(most))
        own_s = sum(compute_s for _, (compute_s, _) in kept)
        return Pass(_lasting(found.steps, self.recompute_s * own_s / most_s if most_s else 0.0))

    def _again(self, recomputed: frozenset[int] | None) -> list[tuple[Kernel, Step]]:
        """Kernels of the forward that run again, and what they are estimated to take."""
        every = list(zip(self.kernels.forward, self.seconds, strict=True))
        if recomputed is None:
            return every
        again = {node.name for place, node in enumerate(self.graph.nodes) if place in recomputed}
        return [own for own in every if not own[0].nodes.isdisjoint(again)]


def price_segments(
    workload: Workload, candidate: Candidate, device: DeviceProfile, cluster: Cluster
) -> tuple[SegmentPrice, ...]:
    """Price every segment on a device.

    Args:
        workload: the model.
        candidate: its microbatch, and its tensor, context, expert and sequence parallelism.
        device: what computes.
        cluster: the links between the ranks of its groups.

    Returns:
        A price per segment; equal segments have one object.
    """
    form = workload.form(candidate)
    groups = groups_of(cluster, form.tp, form.cp, form.ep, form.dp or 1)
    choice = replace(workload.kernels, float32_gradients=workload.common.float32_gradients)
    count = candidate.num_microbatches if choice.runs_joint_graphs else 1

    def priced() -> tuple[tuple[SegmentPrice, ...], DeviceProfile]:
        segments, device_type = workload.local_graph(form).segments, device.device_type
        parts = joint_parts(workload, form, choice, device_type)
        # Of the operators, which other numbers of microbatches have as well.
        known: Operators = workload.once(("operators", form, choice, device_type), dict)
        found = {}
        for index, joint in parts.items():
            graph, kernels = segments[index].graph, None
            if joint is not None:
                graph = joint.segment.graph
                kernels = joint_kernels(joint, choice, device_type, count, known)
            found[index] = price_graph(graph, choice, device, groups, kernels)
        return tuple(found[index] for index in workload.unique(form)), device

    key = ("segments", form, choice, id(device), groups, count)
    return workload.once(key, priced)[0]


def joint_parts(
    workload: Workload, form: Form, choice: KernelChoice, device_type: str
) -> Mapping[int, JointParts | None]:
    """Parts of the joint graphs of the first of all equal segments of a rank, by number.

    Args:
        workload: the model.
        form: its microbatch, and the degrees that its graph depends on.
        choice: which kernels there are.
        device_type: "cpu" or "cuda".

    Returns:
        None for a segment whose backward autograd runs, and where other kernels are priced.
    """
    segments, first = workload.local_graph(form).segments, sorted({*workload.unique(form)})
    if not choice.runs_joint_graphs:
        return dict.fromkeys(first)
    measured = workload.local_model(form).measured(choice.float32_gradients, device_type)
    with pretended(workload.mesh(form)):
        return {index: measured.joint_parts(segments[index]) for index in first}


def model_flops(workload: Workload, microbatch: int) -> float:
    """FLOPs of the whole model for one microbatch, forward and backward, without recomputation."""

    def total() -> float:
        segments = workload.graph(microbatch).segments  # without places of `expert_capacity`
        first = workload.unique(Form(microbatch))
        known = {index: _flops(segments[index].graph) for index in set(first)}
        return sum(known[index] for index in first)

    return workload.once(("flops", microbatch), total)


def _sustained(device: DeviceProfile) -> DeviceProfile:
    """A device of a data sheet at the rates that it sustains; a measured one as it is."""
    if device.efficiency is None:
        return device
    sustained = device.efficiency.sustained
    rates = {dtype: sustained * rate for dtype, rate in device.flops_per_s.items()}
    return replace(device, flops_per_s=MappingProxyType(rates))


def _flops(graph: fx.Graph) -> float:
    works = [node_work(node, "cuda") for node in graph.nodes]
    return sum(kernel.flops for work in works for kernel in (*work.forward, *work.backward))


def price_graph(
    graph: fx.Graph,
    choice: KernelChoice,
    device: DeviceProfile,
    groups: Groups,
    kernels: SegmentKernels | None = None,
) -> SegmentPrice:
    """Price one graph on a device.

    Args:
        graph: of a segment, rewritten for tp and cp where there are such.
        choice: which kernels there are.
        device: what computes.
        groups: the ranks of every axis that the graph's collectives are over.
        kernels: that run, as of `joint_kernels`; None for those of `segment_kernels`.
    """
    kernels = kernels or segment_kernels(graph, choice, device.device_type)
    device = _sustained(device)

    def seconds(kernel: Kernel) -> Step:
        if kernel.collective is not None:
            kind, num_bytes, axis = kernel.collective
            return 0.0, collective_seconds(kind, num_bytes, groups.of(axis))
        assert kernel.work is not None
        return work_seconds(kernel.work, device), 0.0

    def steps(own: Sequence[Kernel]) -> Steps:
        found = tuple(map(seconds, own))
        return _beside_products(own, found, groups.tp.size) if choice.overlaps_products else found

    def timed(own: Sequence[Kernel]) -> Pass:
        return Pass(steps(own), host_s * launches(own))

    host_s = 0.0 if device.efficiency is None else device.efficiency.launch_s
    works = [k.work for k in (*kernels.forward, *kernels.backward) if k.work is not None]
    estimated = SegmentPrice(
        graph=graph,
        forward=timed(kernels.forward),
        backward=timed(kernels.backward),
        input_gradient=timed(kernels.input_gradient),
        weight_gradient=timed(kernels.weight_gradient),
        launch_s=device.overhead_s * sum(work.kernels for work in works),
        kernels=kernels,
        seconds=steps(kernels.forward),
        host_s=host_s,
    )
    return _calibrated(estimated, device)


def launches(kernels: Iterable[Kernel]) -> float:
    """How many kernels and collectives the host launches."""
    return sum(1 if own.work is None else own.work.kernels for own in kernels)


def _launched(own: Sequence[tuple[Kernel, Step]], host_s: float) -> Pass:
    """A pass of some kernels.

    Args:
        own: kernels, and what they take on the device.
        host_s: of a kernel's launch.
    """
    return Pass(tuple(step for _, step in own), host_s * launches(kernel for kernel, _ in own))


def _beside_products(kernels: Sequence[Kernel], steps: Steps, num_ranks: int) -> Steps:
    """A pass whose gathers and reduce-scatters over tp run beside products, chunk by chunk.

    A gather runs beside the next product, and a reduce-scatter beside the last: the product of one
    rank's values beside the transfer of the next rank's. One chunk of them stays exposed.
    """
    found = list(steps)
    products = [i for i, own in enumerate(kernels) if own.work is not None and own.work.flops]
    left_s = {i: steps[i][0] for i in products}
    for place, own in enumerate(kernels):
        kind, _, axis = own.collective or ("", 0.0, "")
        if axis != "tp" or kind not in ("all_gather", "reduce_scatter"):
            continue
        before = [i for i in products if i < place][-1:]
        after = [i for i in products if i > place][:1]
        for product in after if kind == "all_gather" else before:
            hidden_s = min(steps[place][1], left_s[product]) * (1.0 - 1.0 / num_ranks)
            left_s[product] -= hidden_s
            found[place] = INTERFERENCE * hidden_s, steps[place][1] - hidden_s
    return tuple(found)


def _calibrated(estimated: SegmentPrice, device: DeviceProfile) -> SegmentPrice:
    """The price with the computation of every pass as long as measured, where it was."""
    known, graph = device.calibration, estimated.graph
    if known is None or not known.kinds:
        return estimated
    found = known.segment(segment_digest(graph), segment_kind(graph), segment_size(graph))
    if found is None:
        return estimated
    return replace(
        estimated,
        forward=Pass(_lasting(estimated.forward.steps, found.forward_s)),
        backward=Pass(_lasting(estimated.backward.steps, found.backward_s)),
        input_gradient=Pass(_lasting(estimated.input_gradient.steps, found.input_gradient_s)),
        weight_gradient=Pass(_lasting(estimated.weight_gradient.steps, found.weight_gradient_s)),
        recompute_s=found.recompute_s,
        launch_s=0.0,
        host_s=0.0,
    )


def _lasting(steps: Steps, seconds: float) -> Steps:
    """Steps whose computation takes so many seconds."""
    total_s = sum(compute_s for compute_s, _ in steps)
    if not total_s:
        return (*steps, (seconds, 0.0)) if seconds else steps
    return tuple((compute_s * seconds / total_s, rest_s) for compute_s, rest_s in steps)
