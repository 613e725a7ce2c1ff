"""Bounds and estimates of candidates, cheaper than their prices.

Everything rests on the prices of segments, which candidates with the same microbatch, tensor and
sequence parallelism share. No pp rank is faster than its segments, and the busiest has the mean at
least; in a schedule that is first in, first out, a stage waits for those before it besides. The
price has the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch

from merak.core.gradients import LOW_PRECISION
from merak.core.tensor_meta import TensorMeta
from merak.graph.expert_parallel.apply import spread_weights
from merak.graph.ir.ir import Kind, Segment
from merak.plan.cluster.cluster import Cluster
from merak.plan.cluster.collectives import collective_seconds
from merak.plan.cluster.fit import usable_on
from merak.plan.cluster.groups import group_of, send_link
from merak.plan.cost.optimizer_memory import optimizer_memory
from merak.plan.optimizer.home import is_away
from merak.plan.options import zero_degree
from merak.plan.price.candidate import Candidate, Form
from merak.plan.price.price import Misfit, Price
from merak.plan.price.replicas import zero_groups
from merak.plan.price.segments import Pass, SegmentPrice, price_segments
from merak.plan.price.step import price, price_if_fits
from merak.plan.price.workload import Workload
from merak.plan.search.held import Held, HeldEstimates

_SELECTIVE = 0.3
"""Part of a forward that selective recomputation usually runs again."""


class Pricing(Protocol):
    """Prices, bounds and estimates of candidates that a search asks for."""

    def rough_s(self, candidate: Candidate) -> float:
        """Estimate of its step, for the order of the search."""

    def bound_s(self, candidate: Candidate) -> float:
        """Seconds that its step takes at least."""

    def quick_bound_s(self, candidate: Candidate) -> float:
        """Lower bound of its step where no graph has to be made for it; else 0."""

    def state_bytes(self, candidate: Candidate) -> float:
        """Bytes that parameters, gradients and optimizer take on its fullest rank at least."""

    def rough_bytes(self, candidate: Candidate) -> float:
        """Estimate of the memory of its fullest rank, for the order of the search."""

    def price(self, candidate: Candidate) -> Price:
        """Price of the candidate's step.

        Raises:
            MerakError: the model or the schedule does not allow it.
        """

    def price_if_fits(self, candidate: Candidate) -> Price | Misfit:
        """Price of the candidate, or the misfit of a pp rank looked at first; as `price`."""

    @property
    def device_bytes(self) -> float:
        """Bytes that tensors may fill of the largest device."""


@dataclass(frozen=True, slots=True)
class _Form:
    """Seconds of all segments for one microbatch, in one form of the graph.

    Args:
        forward_s: of their forwards.
        again_s: of the forwards of those with a backward, which recomputation can run again.
        backward_s: of their backwards.
        largest_s: of the segment that takes longest.
        host_s: of the host, to launch all of their kernels.
    """

    forward_s: float
    again_s: float
    backward_s: float
    largest_s: float
    host_s: float


@dataclass(frozen=True, slots=True)
class _State:
    """Bytes of parameters, their gradients, and optimizer states.

    Args:
        parameters: all of them.
        without_master: those of which ZeRO 3 holds a shard besides the master's.
        gradients: of the trained ones, as they are accumulated and reduced.
        optimizer: states, masters included.
    """

    parameters: float
    without_master: float
    gradients: float
    optimizer: float

    @classmethod
    def of(
        cls,
        metas: Mapping[str, TensorMeta],
        states: Mapping[TensorMeta, int],
        master_bytes: int,
        gradient_bytes: int,
    ) -> _State:
        """State of some parameters.

        Args:
            metas: by name.
            states: bytes of the optimizer's states by kind, without `requires_grad`.
            master_bytes: of a master of one element.
            gradient_bytes: of one element of a lower precision; 0 for those of the parameter.
        """
        trained = [meta for meta in metas.values() if meta.requires_grad]
        optimizer = sum(states[replace(meta, requires_grad=False)] for meta in trained)
        mastered = [meta for meta in trained if master_bytes and meta.dtype in LOW_PRECISION]
        parameters = sum(meta.num_bytes for meta in metas.values())
        return cls(
            parameters=float(parameters),
            without_master=float(parameters - sum(meta.num_bytes for meta in mastered)),
            gradients=float(sum(_gradient_bytes(meta, gradient_bytes) for meta in trained)),
            optimizer=float(optimizer + master_bytes * sum(math.prod(m.shape) for m in mastered)),
        )

    def held(self, dp: int, zero: int, is_away: bool) -> float:
        """Bytes that a replica's device holds of it under a ZeRO stage."""
        if is_away:
            masters = 2 * (self.parameters - self.without_master)  # float32 of 16 bits
            shards = (self.without_master + masters) / dp
            parameters = shards if zero == 3 else self.parameters
            return parameters + self.gradients / (dp if zero >= 2 else 1)
        held = self.without_master / dp if zero == 3 else self.parameters
        held += self.gradients / (dp if zero >= 2 else 1)
        return held + self.optimizer / (dp if zero else 1)


@dataclass(frozen=True, slots=True)
class _Shares:
    """State of some parameters of one rank, by the ranks that hold the same.

    Args:
        shared: of those that all replicas hold.
        experts: of those of which only every ep-th replica holds the same.
    """

    shared: _State
    experts: _State

    @property
    def gradients(self) -> float:
        """Bytes of all gradients."""
        return self.shared.gradients + self.experts.gradients

    def held(self, candidate: Candidate) -> float:
        """Bytes that a replica of a candidate holds of it."""
        copies, zero = candidate.traits.num_copies, candidate.zero
        replicas = zero_degree(candidate, candidate.replicas, copies)
        same = replicas // candidate.ep if candidate.form.spreads_experts else replicas
        away = is_away(candidate.offload_optimizer)
        return self.shared.held(replicas, zero, away) + self.experts.held(same, zero, away)


@dataclass(frozen=True, slots=True)
class _Tied:
    """Bytes of the gradients of parameters that several segments read.

    Args:
        at_ends: of those that only the first and the last segment read.
        elsewhere: of all others.
    """

    at_ends: float
    elsewhere: float


def _gradient_bytes(meta: TensorMeta, of_low: int) -> int:
    is_low = of_low and meta.dtype in LOW_PRECISION
    return math.prod(meta.shape) * of_low if is_low else meta.num_bytes


@dataclass(slots=True, eq=False)
class JobPricing:
    """Prices and bounds of a job's candidates on a cluster.

    Args:
        workload: the job.
        cluster: the devices.
        base: microbatch whose times the rough estimates of other microbatches are scaled from.
    """

    workload: Workload
    cluster: Cluster
    base: int = 1
    _forms: dict[tuple[Form, bool, int], _Form] = field(init=False, default_factory=dict)
    _graphs: set[Form] = field(init=False, default_factory=set)
    _states: dict[Form, tuple[_Shares, _Shares]] = field(init=False, default_factory=dict)
    _tied: dict[Form, _Tied] = field(init=False, default_factory=dict)

    @property
    def device_bytes(self) -> float:
        """Bytes that tensors may fill of the largest device, if there are no communicators."""
        return max(map(usable_on, self.cluster.devices))

    def price(self, candidate: Candidate) -> Price:
        """The price of a candidate."""
        return price(self.workload, self.cluster, candidate)

    def price_if_fits(self, candidate: Candidate) -> Price | Misfit:
        """Price of the candidate, or the misfit of its first pp rank."""
        return price_if_fits(self.workload, self.cluster, candidate)

    def bound_s(self, candidate: Candidate) -> float:
        """Seconds that a candidate's step takes at least."""
        form, count = self._form(candidate), candidate.num_microbatches
        again_s = form.again_s if candidate.recompute == "full" else 0.0
        whole_s = max(form.forward_s + form.backward_s + again_s, form.host_s)
        least_s = count * max(whole_s / candidate.pp, form.largest_s)
        if candidate.traits.is_fifo:
            # Stage i takes m·t[i] after the t of those before it; equal where t shrinks by 1 − 1/m.
            shrinks = 1.0 - (1.0 - 1.0 / count) ** candidate.pp
            least_s = max(least_s, whole_s / shrinks)
        return least_s

    def quick_bound_s(self, candidate: Candidate) -> float:
        """Lower bound of its step where its graph is there already; else 0."""
        return self.bound_s(candidate) if self.workload.form(candidate) in self._graphs else 0.0

    def rough_s(self, candidate: Candidate) -> float:
        """Estimate of a candidate's step, without the graph of another microbatch."""
        scale = candidate.microbatch / self.base
        # Sharding over the sequence moves as many bytes over tp; it is told apart by the price.
        form = self._form(replace(candidate, microbatch=self.base, sequence_parallel=False))
        again = {"full": 1.0, "selective": _SELECTIVE}.get(str(candidate.recompute), 0.0)
        whole_s = form.forward_s * (1 + again) + form.backward_s
        stage_s = max(whole_s / candidate.pp, form.largest_s) * scale
        stage_s = max(stage_s, form.host_s / candidate.pp)
        pipeline_s = stage_s * (candidate.num_microbatches + candidate.traits.bubble)
        tied_s = self._rough_tied_s(candidate, stage_s)
        return pipeline_s + tied_s + self._rough_replicas_s(candidate, pipeline_s)

    def _rough_tied_s(self, candidate: Candidate, stage_s: float) -> float:
        """What gradients of tied parameters add, which the ranks that hold them exchange."""
        tied = self._tied_bytes(candidate)
        sent = tied.elsewhere + (0.0 if candidate.traits.joins_ends else tied.at_ends)
        if candidate.pp == 1 or not sent:
            return 0.0
        link = send_link(self.cluster, 0, (candidate.pp - 1) * candidate.stage_ranks)
        hop_s = link.latency_s + sent / link.bytes_per_s
        waits_s = max(0.0, hop_s - stage_s) * candidate.num_microbatches
        return 2 * hop_s + self.workload.common.exact_tied_gradients * waits_s

    def _rough_replicas_s(self, candidate: Candidate, pipeline_s: float) -> float:
        """What the exchanges of replicas add, as far as the pipeline does not hide them."""
        if candidate.replicas == 1:
            return 0.0
        replicas = group_of(self.cluster, candidate.replicas, candidate.tp)
        whole, _ = self._state(candidate)
        if self.workload.common.local_steps and candidate.cp == 1:
            sent_s = collective_seconds("all_reduce", whole.gradients / candidate.pp, replicas)
            return sent_s / self.workload.common.local_steps
        zero, count = candidate.zero, candidate.num_microbatches
        kind = "reduce_scatter" if zero else "all_reduce"
        parts = [(whole.shared, replicas)]
        if candidate.form.spreads_experts:
            ep = candidate.ep
            parts.append((whole.experts, group_of(self.cluster, candidate.replicas // ep, ep)))
        reduce_s = gather_s = 0.0
        levels = zero_groups(self.cluster, candidate)
        if levels is not None:
            parts = [(whole.shared, levels[0])]
            shards = whole.shared.gradients / candidate.pp / levels[0].size
            reduce_s += collective_seconds("all_reduce", shards, levels[1])
        for state, group in parts:
            reduce_s += collective_seconds(kind, state.gradients / candidate.pp, group)
            gather_s += collective_seconds("all_gather", state.parameters / candidate.pp, group)
        # Sharded gradients are reduced behind every microbatch, others behind the last.
        reductions, gathers = count if zero >= 2 else 1, 2 * count if zero == 3 else 0
        beside_s = reductions * reduce_s + gathers * gather_s
        hides_s = pipeline_s / (1 if zero >= 2 else count)
        updated_s = gather_s if zero in (1, 2) else 0.0
        return max(0.0, beside_s - hides_s) + 0.1 * beside_s + updated_s

    def state_bytes(self, candidate: Candidate) -> float:
        """Bytes of parameters, gradients and optimizer on the fullest rank.

        They are no less than the mean over pp ranks, and than those of the largest segment.
        """
        whole, largest = self._state(candidate)
        return max(whole.held(candidate) / candidate.pp, largest.held(candidate))

    def rough_bytes(self, candidate: Candidate) -> float:
        """Estimate of the memory of a candidate's fullest rank."""
        own = self._held(self.workload.form(candidate))
        scale = candidate.microbatch / self.base
        recompute, traits = str(candidate.recompute), candidate.traits
        if traits.splits_backwards:  # which hold what was recomputed until the W
            recompute = "off"
        held = own.saved.get(recompute, own.saved["off"])
        activations = scale * (held * traits.in_flight / candidate.pp + own.largest)
        # Sharded gradients are sent from copies, and those of a segment are whole before.
        copies = min(candidate.zero, 2) * self._state(candidate)[1].gradients
        return self.state_bytes(candidate) + activations + copies

    def _held(self, form: Form) -> Held:
        device = self.cluster.nodes[0].device
        made = partial(HeldEstimates, self.workload, device)
        return self.workload.once(("held", id(device)), made)(replace(form, microbatch=self.base))

    def _state(self, candidate: Candidate) -> tuple[_Shares, _Shares]:
        """State of the whole model on one rank, and that of its largest segment."""
        # Sharing out tokens leaves parameters as they are.
        form = Form(self.base, candidate.tp, ep=candidate.ep)
        if form not in self._states:
            graph = self.workload.local_graph(form)
            segments = [_parameters(segment) for segment in graph.segments]
            # Parameters that no segment reads are whole on every rank.
            every = dict(graph.parameters)
            for own in segments:
                every |= own
            kinds = list({replace(m, requires_grad=False): m for m in every.values()})
            device, decay = torch.device("cpu"), self.workload.common.ema_decay
            memory = optimizer_memory(self.workload.optimizer, kinds, device, ema_decay=decay)
            states = dict(zip(kinds, memory.state_bytes, strict=True))
            master_bytes = 4 if self.workload.common.master_weights else 0
            gradient_bytes = 4 if self.workload.common.float32_gradients else 0
            spread = frozenset[str]()
            if form.spreads_experts:
                spread = spread_weights(self.workload.graph(self.base))

            def shares(own: Mapping[str, TensorMeta]) -> _Shares:
                parts = ({}, {})  # type: tuple[dict[str, TensorMeta], dict[str, TensorMeta]]
                for name, meta in own.items():
                    parts[name in spread][name] = meta
                return _Shares(*(_State.of(p, states, master_bytes, gradient_bytes) for p in parts))

            found = [shares(own) for own in (every, *segments)]
            largest = max(found[1:], key=lambda own: own.held(Candidate()), default=found[0])
            self._states[form] = found[0], largest
        return self._states[form]

    def _tied_bytes(self, candidate: Candidate) -> _Tied:
        form = Form(self.base, candidate.tp, ep=candidate.ep)
        if form not in self._tied:
            segments = self.workload.local_graph(form).segments
            readers: dict[str, list[int]] = {}
            metas: dict[str, TensorMeta] = {}
            for number, segment in enumerate(segments):
                for name, meta in _parameters(segment).items():
                    readers.setdefault(name, []).append(number)
                    metas[name] = meta
            ends = {0, len(segments) - 1}
            of_low = 4 if self.workload.common.float32_gradients else 0
            tied = [(n, own) for n, own in readers.items() if metas[n].requires_grad and own[1:]]
            sizes = [(_gradient_bytes(metas[n], of_low), ends.issuperset(own)) for n, own in tied]
            self._tied[form] = _Tied(
                float(sum(size for size, at_ends in sizes if at_ends)),
                float(sum(size for size, at_ends in sizes if not at_ends)),
            )
        return self._tied[form]

    def _form(self, candidate: Candidate) -> _Form:
        form, split = self.workload.form(candidate), candidate.splits
        key = form, split, candidate.num_microbatches  # most of which add to gradients
        if key not in self._forms:
            graph = self.workload.graph(form.microbatch, form.dp)
            trained = [
                any(graph.values[n].requires_grad for n in s.outputs) for s in graph.segments
            ]
            priced = partial(price_segments, self.workload, candidate, cluster=self.cluster)
            found = [_form(priced(own.device), trained, split) for own in self.cluster.nodes]
            self._graphs.add(form)
            self._forms[key] = _Form(
                min(own.forward_s for own in found),
                min(own.again_s for own in found),
                min(own.backward_s for own in found),
                min(own.largest_s for own in found),
                min(own.host_s for own in found),
            )
        return self._forms[key]


def _parameters(segment: Segment) -> dict[str, TensorMeta]:
    """Parameters that a segment reads, as large as the rank's shards."""
    return {
        node.meta["name"]: node.meta["tensor"]
        for node in segment.graph.find_nodes(op="placeholder")
        if node.meta["kind"] is Kind.PARAMETER
    }


def _form(prices: Sequence[SegmentPrice], trained: Sequence[bool], split: bool) -> _Form:
    """Times of segments; without collectives, which others may hide, where they are split."""
    times = [(_seconds(own.forward, split), _backward_s(own, split)) for own in prices]
    return _Form(
        sum(forward for forward, _ in times),
        sum(forward for (forward, _), trains in zip(times, trained, strict=True) if trains),
        sum(backward for _, backward in times),
        max((forward + backward for forward, backward in times), default=0.0),
        sum(map(_host_s, prices)),
    )


def _seconds(own: Pass, split: bool) -> float:
    """Of the device: the host may launch a stage's shorter segments beside its longer ones."""
    return sum(compute_s + (0.0 if split else rest_s) for compute_s, rest_s in own.steps)


def _host_s(own: SegmentPrice) -> float:
    apart = own.input_gradient.host_s + own.weight_gradient.host_s
    return own.forward.host_s + min(own.backward.host_s, apart)


def _backward_s(own: SegmentPrice, split: bool) -> float:
    apart = _seconds(own.input_gradient, split) + _seconds(own.weight_gradient, split)
    return min(_seconds(own.backward, split), apart)
