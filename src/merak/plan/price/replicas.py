"""Collectives of replicas: gradients, parameters, and the gradients of tied parameters.

Gradients are reduced in buckets beside the last backward of a stage, updated parameters gathered
beside the first forward, and ZeRO-3's parameters beside every action. A collective beside
computation slows it down: its kernels take some of the device's units and of its memory bandwidth.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch

from merak.core.mesh import EXPERT_REPLICAS, REPLICAS
from merak.core.tensor_meta import TensorMeta
from merak.graph.expert_parallel.apply import spread_weights
from merak.plan.cluster.cluster import Cluster
from merak.plan.cluster.groups import Group, group_of, send_link
from merak.plan.cluster.hierarchy import reduction_seconds, replicas_of_stage
from merak.plan.cost.calibration import PassSeconds
from merak.plan.cost.overlap import INTERFERENCE
from merak.plan.gradient_compression import LARGEST, WITH_ERROR_FEEDBACK, compressed_bytes
from merak.plan.layout import Layout
from merak.plan.memory.zero import ZeroSharding
from merak.plan.options import BUCKET_BYTES, ParallelOptions, zero_degree
from merak.plan.price.candidate import Candidate
from merak.plan.price.stages import Stage
from merak.plan.price.unshards import Unshard, unshard_waits
from merak.plan.price.workload import Workload
from merak.plan.tied_parameters import find_holders
from merak.schedule.ir import Schedule


@dataclass(frozen=True, slots=True)
class StageExchange:
    """Seconds that a stage's exchanges between replicas add.

    Args:
        reduction_s: of its gradients, after the last backward, and what they slow it down.
        passes: added to every forward, recomputation, backward, I and W.
        gather_s: of updated parameters, which the first forward waits for.
        num_gathers: collectives that they are gathered by, one after another.
        interference: part of the hidden time that the computation takes longer.
        unhidden_reduction_s: of its gradients after the last backward, where nothing hides them.
    """

    reduction_s: float
    passes: PassSeconds
    gather_s: float
    num_gathers: int = 1
    interference: float = INTERFERENCE
    unhidden_reduction_s: float = 0.0


def zero_sharding(candidate: Candidate, workload: Workload, float32: bool) -> ZeroSharding:
    """State that the replicas of a candidate shard by ZeRO.

    Args:
        candidate: how the job is laid out.
        workload: the job.
        float32: whether gradients of low precision are accumulated in float32.
    """
    spreads = candidate.form.spreads_experts
    return ZeroSharding(
        experts=spread_weights(workload.graph(candidate.microbatch)) if spreads else frozenset(),
        expert_replicas=candidate.replicas // candidate.ep if spreads else 1,
        degree=zero_degree(candidate, candidate.replicas, candidate.traits.num_copies),
        gradients=candidate.zero >= 2 and candidate.replicas > 1,
        master_weights=workload.common.master_weights,
        float32_gradients=float32,
        parameters=candidate.zero == 3 and candidate.replicas > 1,
    )


def stage_exchange(
    stage: Stage,
    number: int,
    cluster: Cluster,
    candidate: Candidate,
    schedule: Schedule,
    zero: ZeroSharding,
    workload: Workload,
) -> StageExchange:
    """Price what the replicas of a stage exchange.

    Args:
        stage: its times and parameters.
        number: of the stage.
        cluster: the devices.
        candidate: the degrees.
        schedule: with the stage's ranks.
        zero: what replicas shard.
        workload: how they reduce; `averaging_seconds` prices what Local SGD exchanges.
    """
    copies = schedule.ranks_of(number)
    exchanges = _Exchanges(stage, copies, cluster, candidate, zero, workload)
    trained = exchanges.trained
    kind, sent = _reduction(trained, candidate, zero, workload.common)
    slows = interference_of(exchanges.everyone)
    reduce_s = exchanges.seconds(kind, trained, sent)
    packs_s = exchanges.copy_seconds(kind, sent)
    held = {name: meta.num_bytes for name, meta in stage.parameters.items()}
    unpacks_s = exchanges.copy_seconds("all_gather", held) if zero.is_sharded else 0.0
    if zero.parameters:
        unshards = _unshards(stage, exchanges, kind, sent, held)
        beside = partial(beside_s, interference=slows)
        passes, once_s = unshard_waits(unshards, schedule, number, beside)
        copies_s = PassSeconds(unpacks_s, unpacks_s, unpacks_s + packs_s, unpacks_s, packs_s)
        return StageExchange(
            reduction_s=once_s,
            passes=passes.plus(copies_s),
            gather_s=0.0,
            unhidden_reduction_s=reduce_s,
        )
    times, full = stage.whole, workload.common.bucket_bytes
    num_reductions = max(1, len(_buckets(trained, sent, full)))
    hides_s = times.weight_gradient_s if schedule.splits_backwards else times.backward_s
    computes_s = times.backward_s * (1 - 1 / num_reductions)
    if workload.common.gradient_compression in WITH_ERROR_FEEDBACK:
        computes_s = 0.0  # which reduces after the backward pass
    # What is open when a backward ends is hidden by the next one, and by nothing behind the last.
    once_s = max(reduce_s / num_reductions, beside_s(computes_s, reduce_s, slows)) + packs_s
    every_s = beside_s(hides_s, reduce_s, slows) + packs_s if zero.gradients else 0.0
    is_gathered = zero.is_sharded
    return StageExchange(
        reduction_s=max(0.0, once_s - every_s) + unpacks_s,
        passes=PassSeconds(0.0, 0.0, every_s, 0.0, every_s),
        gather_s=exchanges.seconds("all_gather", stage.parameters, held) if is_gathered else 0.0,
        num_gathers=max(1, len(_buckets(stage.parameters, held, full))),
        interference=slows,
        unhidden_reduction_s=reduce_s + packs_s + unpacks_s,
    )


def _unshards(
    stage: Stage,
    exchanges: _Exchanges,
    kind: str,
    sent: Mapping[str, int],
    held: Mapping[str, int],
) -> list[Unshard]:
    """The segments of a stage whose parameters are gathered, with what each takes.

    What lies between two of them is computed beside the collectives of the first. Parameters that
    several read are exchanged with the first, as far as the price knows.

    Args:
        stage: the segments.
        exchanges: between its replicas.
        kind: of the collective of gradients.
        sent: bytes of every gradient that is sent.
        held: bytes of every parameter.
    """
    forwards_s = sum(own.forward_s for own in stage.segments) or 1.0
    backwards_s = sum(own.backward_s for own in stage.segments) or 1.0
    whole = stage.whole
    found, known = list[Unshard](), set[str]()
    for own in stage.segments:
        names = [name for name in dict.fromkeys(own.parameters) if name not in known]
        known.update(names)
        metas = {name: stage.parameters[name] for name in names}
        trained = {name: meta for name, meta in metas.items() if name in sent}
        forward, backward = own.forward_s / forwards_s, own.backward_s / backwards_s
        times = PassSeconds(
            forward * whole.forward_s,
            own.recompute_s * whole.forward_s / forwards_s,
            backward * whole.backward_s,
            backward * whole.input_gradient_s,
            backward * whole.weight_gradient_s,
        )
        if found and not names:
            before = found.pop()
            found.append(replace(before, times=before.times.plus(times)))
            continue
        gather_s = exchanges.seconds("all_gather", metas, held)
        found.append(Unshard(times, gather_s, exchanges.seconds(kind, trained, sent)))
    return found


def zero_groups(cluster: Cluster, candidate: Candidate) -> tuple[Group, Group] | None:
    """The replicas that shard between them, and those with the same shards; None for no groups.

    Args:
        cluster: the devices.
        candidate: the layout.
    """
    size = zero_degree(candidate, candidate.replicas)
    if not candidate.zero or size == candidate.replicas:
        return None
    between = group_of(cluster, candidate.replicas // size, size * candidate.tp)
    return group_of(cluster, size, candidate.tp), between


def _reduction(
    trained: Mapping[str, TensorMeta],
    candidate: Candidate,
    zero: ZeroSharding,
    options: ParallelOptions,
) -> tuple[str, dict[str, int]]:
    """The collective that reduces gradients, and the bytes of each gradient."""
    sizes, compression = zero.gradient_bytes(trained), options.gradient_compression
    if compression == "off":
        return "reduce_scatter" if candidate.zero else "all_reduce", sizes
    sent = {
        name: compressed_bytes(
            compression,
            meta.shape,
            sizes[name] // max(1, math.prod(meta.shape)),
            options.powersgd_rank,
            options.topk_fraction,
        )
        for name, meta in trained.items()
    }
    if compression not in LARGEST:
        return "all_reduce", sent
    return "all_gather", {name: max(2, candidate.replicas) * size for name, size in sent.items()}


class _Exchanges:
    """Collectives between the replicas of a stage, whose experts other replicas exchange.

    Args:
        stage: its parameters.
        pp_ranks: those that hold it.
        cluster: the devices.
        candidate: the degrees.
        zero: which parameters are experts.
        workload: how they reduce.
    """

    def __init__(
        self,
        stage: Stage,
        pp_ranks: tuple[int, ...],
        cluster: Cluster,
        candidate: Candidate,
        zero: ZeroSharding,
        workload: Workload,
    ) -> None:
        self._hierarchy = workload.common.hierarchical_reductions
        self._levels = zero_groups(cluster, candidate)
        # What ZeRO 3 shards goes a segment at a time.
        self._bucket_bytes = sys.maxsize if zero.parameters else workload.common.bucket_bytes
        self.trained = {n: meta for n, meta in stage.parameters.items() if meta.requires_grad}
        # Under Local SGD, context parallel ranks alone reduce gradients.
        axis = "cp" if workload.common.local_steps else REPLICAS
        mesh = candidate.mesh(0, torch.device("cpu"))
        self.everyone = replicas_of_stage(cluster, mesh, pp_ranks, axis)
        self._copies = workload.kernels.copies_buckets
        self._memory_bytes_per_s = min(own.device.memory_bytes_per_s for own in cluster.nodes)
        self._experts = zero.experts
        self._same_experts = None
        if zero.experts and (zero.expert_replicas > 1 or len(pp_ranks) > 1):
            self._same_experts = replicas_of_stage(cluster, mesh, pp_ranks, EXPERT_REPLICAS)

    def seconds(
        self, kind: str, metas: Mapping[str, TensorMeta], num_bytes: Mapping[str, int]
    ) -> float:
        """Seconds of a collective of some parameters, in buckets.

        Args:
            kind: of the collective.
            metas: the parameters in the model's order.
            num_bytes: of each that is sent.
        """
        shared = {n: meta for n, meta in metas.items() if n not in self._experts}
        levels = self._hierarchy
        own = _buckets(shared, num_bytes, self._bucket_bytes)
        if self._levels is not None:
            inside, between = self._levels
            total = _one_by_one(kind, own, inside)
            if kind == "reduce_scatter":
                total += _one_by_one("all_reduce", [n // inside.size for n in own], between)
            return total
        total = _one_by_one(kind, own, self.everyone, levels)
        if self._same_experts is not None:
            experts = {n: meta for n, meta in metas.items() if n in self._experts}
            own = _buckets(experts, num_bytes, self._bucket_bytes)
            total += _one_by_one(kind, own, self._same_experts, levels)
        return total

    def copy_seconds(self, kind: str, num_bytes: Mapping[str, int]) -> float:
        """Seconds in which a device copies tensors into the buckets of a collective, and out.

        Args:
            kind: of the collective.
            num_bytes: of each that is sent.
        """
        if self.everyone.size == 1 or not self._copies:
            return 0.0
        return _COPIES[kind] * sum(num_bytes.values()) / self._memory_bytes_per_s


_COPIES = {"all_reduce": 4, "reduce_scatter": 3, "all_gather": 2}
"""Times that a tensor is read or written beside a collective: by each copy twice, by zeros once."""


def averaging_seconds(
    stages: Sequence[Stage],
    cluster: Cluster,
    candidate: Candidate,
    zero: ZeroSharding,
    local_steps: int,
) -> float:
    """Seconds of a step for the averages of Local SGD: one exchange, divided by its steps.

    Args:
        stages: those of one pp rank.
        cluster: the devices.
        candidate: the degrees.
        zero: the precision of what the optimizer steps.
        local_steps: steps from one average to the next; 0 for none.
    """
    if not local_steps or candidate.dp == 1:
        return 0.0
    group = group_of(cluster, candidate.dp, candidate.cp * candidate.tp)
    total = 0.0
    for stage in stages:
        trained = {name: meta for name, meta in stage.parameters.items() if meta.requires_grad}
        stepped = zero.optimizer_tensors(trained)
        sizes = {name: 4 * math.prod(meta.shape) for name, meta in stepped.items()}
        total += _one_by_one("all_reduce", _buckets(stepped, sizes), group)
    return total / local_steps


def beside_s(compute_s: float, collective_s: float, interference: float = INTERFERENCE) -> float:
    """Seconds that a collective adds to the computation beside it.

    Args:
        compute_s: of the computation.
        collective_s: of the collective.
        interference: part of the hidden time that the computation takes longer.
    """
    hidden = min(compute_s, collective_s)
    return collective_s - hidden + interference * hidden


def interference_of(group: Group) -> float:
    """Interference of computation with a group's slowest link: measured, or else the usual."""
    link = group.network if group.network is not None else group.link
    measured = None if link is None else link.interference
    return INTERFERENCE if measured is None else measured


def exposed_gather_s(stages: Sequence[Stage], exchanges: Sequence[StageExchange]) -> float:
    """Seconds that a step waits for updated parameters.

    A stage's forward waits for those of its own; earlier stages compute meanwhile. What it reads
    first comes with the first collective, which nothing of its own forward hides.
    """
    before, worst = 0.0, 0.0
    for stage, exchange in zip(stages, exchanges, strict=True):
        first = 1 / exchange.num_gathers
        if exchange.gather_s:
            beside = before + stage.whole.forward_s * (1 - first)
            waits_s = beside_s(beside, exchange.gather_s, exchange.interference)
            worst = max(worst, first * exchange.gather_s - before, waits_s)
        before += stage.whole.forward_s
    return worst


def tied_seconds(
    layout: Layout,
    stages: Sequence[Stage],
    cluster: Cluster,
    candidate: Candidate,
    zero: ZeroSharding,
    every_microbatch: bool,
) -> float:
    """Seconds of the reductions of tied parameters that nothing hides.

    After every microbatch, or once a step, a holder sends its gradient on to the next, and the last
    the sum back. A microbatch takes at least as long as the transfer, and the last transfers are
    waited for.
    """
    if not layout.schedule.is_synchronous:
        return 0.0
    size = candidate.stage_ranks
    period_s = max(s.whole.forward_s + s.whole.recompute_s + s.whole.backward_s for s in stages)
    total = 0.0
    for name, holders in find_holders(layout.readers(0)).items():
        metas = [stages[h.stage].parameters.get(name) for h in holders]
        meta = next((m for m in metas if m is not None and m.requires_grad), None)
        if meta is None or len(holders) < 2:
            continue
        num_bytes = sum(zero.gradient_bytes({name: meta}).values())
        hops = [
            _send_s(cluster, one.rank * size, other.rank * size, num_bytes)
            for one, other in pairwise(holders)
        ]
        total += 2 * sum(hops)
        if every_microbatch:
            total += max(0.0, max(hops) - period_s) * candidate.num_microbatches
    return total


def _send_s(cluster: Cluster, source: int, target: int, num_bytes: float) -> float:
    link = send_link(cluster, source, target)
    return link.latency_s + num_bytes / link.bytes_per_s


def _buckets(
    metas: Mapping[str, TensorMeta], num_bytes: Mapping[str, int], full_bytes: int = BUCKET_BYTES
) -> list[int]:
    """Bytes of every bucket of some parameters, as the engine fills them.

    Args:
        metas: the parameters in the model's order; their gradients become final in the reverse one.
        num_bytes: of each that is sent.
        full_bytes: a bucket is full as soon as it holds this much.
    """
    buckets: list[int] = []
    size, dtype = full_bytes, None
    for name in reversed(list(metas)):
        meta = metas[name]
        if size >= full_bytes or meta.dtype != dtype:
            buckets.append(0)
            size, dtype = 0, meta.dtype
        buckets[-1] += num_bytes[name]
        size += meta.num_bytes
    return buckets


def _one_by_one(kind: str, buckets: Sequence[int], group: Group, hierarchy: str = "off") -> float:
    """Seconds of a collective that goes in buckets, one after another."""
    return sum(
        count * reduction_seconds(kind, num_bytes, group, hierarchy)
        for num_bytes, count in Counter(buckets).items()
    )
