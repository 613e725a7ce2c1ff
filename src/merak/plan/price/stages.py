"""Costs of a candidate's stages for the simulator: whole actions, and their computation alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import ModelGraph
from merak.plan.activation_policy import ActivationPolicy
from merak.plan.cluster.cluster import Cluster
from merak.plan.cluster.groups import send_link
from merak.plan.cost.calibration import PassSeconds
from merak.plan.cost.overlap import interleaved_s
from merak.plan.cost.segments.memory import SegmentMemory
from merak.plan.partition import Partition
from merak.plan.price.candidate import Candidate
from merak.plan.price.segments import Pass, SegmentPrice, steps_seconds
from merak.schedule.costs import Costs, Link, stage_costs
from merak.schedule.ir import Schedule


@dataclass(frozen=True, slots=True)
class StageSegment:
    """A segment of a stage.

    Args:
        parameters: their names.
        forward_s: of its forward.
        recompute_s: of its recomputation.
        backward_s: of its backward.
    """

    parameters: tuple[str, ...]
    forward_s: float
    recompute_s: float
    backward_s: float


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage: its times, and the parameters that it holds.

    Args:
        whole: its actions with collectives over tp and cp.
        compute: the same without them.
        parameters: by name, the rank's shards.
        segments: each by itself.
    """

    whole: PassSeconds
    compute: PassSeconds
    parameters: Mapping[str, TensorMeta]
    segments: tuple[StageSegment, ...]


def price_stages(
    graph: ModelGraph,
    segments: Sequence[Sequence[SegmentPrice]],
    partition: Partition,
    policy: ActivationPolicy,
    memory: Mapping[int, SegmentMemory],
    split: bool,
) -> tuple[Stage, ...]:
    """Price the stages of a layout.

    Args:
        graph: of a tensor parallel rank.
        segments: for every stage, the prices of all segments on its device.
        partition: segments of every stage.
        policy: what is saved and recomputed.
        memory: of all segments, which knows what a recomputation runs again.
        split: whether microbatches run as two sub-microbatches.
    """
    return tuple(
        _stage(graph, prices, own, policy, memory, split)
        for prices, own in zip(segments, partition.stages, strict=True)
    )


def _stage(
    graph: ModelGraph,
    prices: Sequence[SegmentPrice],
    numbers: Sequence[int],
    policy: ActivationPolicy,
    memory: Mapping[int, SegmentMemory],
    split: bool,
) -> Stage:
    passes: dict[str, list[Pass]] = {own.name: [] for own in fields(PassSeconds)}
    parameters: dict[str, TensorMeta] = {}
    segments: list[StageSegment] = []
    for index in numbers:
        price, segment = prices[index], graph.segments[index]
        passes["forward_s"].append(price.forward)
        passes["backward_s"].append(price.backward)
        passes["input_gradient_s"].append(price.input_gradient)
        passes["weight_gradient_s"].append(price.weight_gradient)
        recompute_s = 0.0
        if index not in policy.saved:
            ops = policy.selective.get(index)
            most = memory[index].recomputed
            again = most if ops is None else ops.memory.recomputed
            passes["recompute_s"].append(price.recompute(again, most))
            recompute_s = passes["recompute_s"][-1].seconds
        names = tuple(segment.parameters)
        segments.append(StageSegment(names, price.forward_s, recompute_s, price.backward_s))
        parameters |= dict(zip(segment.parameters, price.parameters.values(), strict=True))
    times = {name: _seconds(found, split) for name, found in passes.items()}
    whole = PassSeconds(**{name: own for name, (own, _) in times.items()})
    compute = PassSeconds(**{name: own for name, (_, own) in times.items()})
    return Stage(whole, compute, parameters, tuple(segments))


def _seconds(passes: Sequence[Pass], split: bool) -> tuple[float, float]:
    """Seconds of passes one after another, and of them without collectives that nothing hides.

    The host launches ahead of the device, each sub-microbatch by itself, and is waited for where
    it takes longer.
    """
    steps = [step for own in passes for step in own.steps]
    device_s = interleaved_s(steps) if split else steps_seconds(steps)
    waits_s = max(0.0, (1 + split) * sum(own.host_s for own in passes) - device_s)
    return device_s + waits_s, sum(compute_s for compute_s, _ in steps) + waits_s


def costs_of(
    times: Sequence[PassSeconds],
    links: Sequence[Link],
    boundary_bytes: Sequence[float],
    reduction_s: Sequence[float],
) -> Costs:
    """Costs for the simulator.

    Args:
        times: of every stage.
        links: between neighbouring stages.
        boundary_bytes: of what crosses each boundary.
        reduction_s: of every stage's gradients, what its last backward does not hide.
    """
    recompute_s = tuple(own.recompute_s for own in times)
    return stage_costs(
        tuple(own.forward_s for own in times),
        tuple(own.backward_s for own in times),
        recompute_s=recompute_s,
        input_gradient_s=tuple(own.input_gradient_s for own in times),
        weight_gradient_s=tuple(own.weight_gradient_s for own in times),
        links=tuple(links),
        boundary_bytes=tuple(boundary_bytes),
        reduction_s=tuple(reduction_s),
    )


def boundary_bytes(graph: ModelGraph, partition: Partition) -> tuple[float, ...]:
    """Bytes that cross each boundary between stages, for one microbatch and one rank of tp."""
    crossing = graph.boundaries()
    return tuple(
        float(sum(graph.values[name].num_bytes for name in crossing[cut - 1]))
        for cut in partition.cuts
    )


def stage_links(cluster: Cluster, candidate: Candidate, schedule: Schedule) -> tuple[Link, ...]:
    """The slowest link between each two neighbouring stages, over all replicas and pipes."""
    found = []
    size = candidate.stage_ranks
    known: dict[tuple[int, int], Link] = {}
    for stage in range(schedule.num_stages - 1):
        pairs = {(pipe[stage], pipe[stage + 1]) for pipe in schedule.pipes}
        for pair in pairs - known.keys():
            known[pair] = _slowest(cluster, pair[0] * size, pair[1] * size, size)
        found.append(max((known[pair] for pair in pairs), key=_send_s))
    return tuple(found)


def _slowest(cluster: Cluster, start: int, other: int, size: int) -> Link:
    if start == other:
        return Link()
    pairs = {(start, other), (start + size - 1, other + size - 1)}
    links = {send_link(cluster, *pair) for pair in pairs}
    return max((Link(link.latency_s, link.bytes_per_s) for link in links), key=_send_s)


_USUAL_MESSAGE = 16 * 2**20


def _send_s(link: Link) -> float:
    return link.latency_s + _USUAL_MESSAGE / link.bandwidth_bytes_per_s


def slower(times: PassSeconds, *added: PassSeconds) -> PassSeconds:
    """Times with seconds added, those of a recomputation only where there is one.

    Args:
        times: of a stage.
        added: to each of its passes.
    """
    total = times.plus(*added)
    return total if times.recompute_s else replace(total, recompute_s=0.0)
