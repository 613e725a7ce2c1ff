"""Bounds and estimates of candidates, cheaper than their prices.

Everything rests on the prices of segments, which candidates with the same microbatch, tensor and
sequence parallelism share. No pp rank is faster than its segments, and the busiest has the mean at
least; in 1F1B a stage waits for those before it besides. The price has the rest.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from merak.core.gradients import is_low_precision
from merak.core.tensor_meta import TensorMeta
from merak.plan.cluster.cluster import Cluster
from merak.plan.cluster.collectives import collective_seconds
from merak.plan.cluster.groups import group_of
from merak.plan.cost.device import usable_bytes
from merak.plan.cost.optimizer_memory import optimizer_memory
from merak.plan.partition import Partition
from merak.plan.price.candidate import Candidate
from merak.plan.price.price import Price
from merak.plan.price.segments import SegmentPrice, price_segments
from merak.plan.price.step import price
from merak.plan.price.workload import Workload
from merak.plan.search.space import SPLIT

_FIFO = frozenset({"1f1b", "gpipe", "early_recompute", "last_no_recompute"})
"""Schedules in which a stage starts when those before it have run a microbatch."""

_BUBBLES = {"zero_bubble_h1": 1 / 3, "zero_bubble_v": 0.1, "dualpipe_v": 0.2}
"""Usual bubbles of schedules with split backwards, as fractions of 1F1B's."""

_SELECTIVE = 0.3
"""Part of a forward that selective recomputation usually runs again."""

_SELECTIVE_SAVES = 0.5
"""Part of the saved activations that selective recomputation usually leaves."""

_SEQUENCE = 0.7
"""Part of the saved activations that sharding over the sequence usually leaves."""


class Pricing(Protocol):
    """What a search asks about candidates."""

    def rough_s(self, candidate: Candidate) -> float:
        """Estimate of its step, for the order of the search."""

    def bound_s(self, candidate: Candidate) -> float:
        """Seconds that its step takes at least."""

    def quick_bound_s(self, candidate: Candidate) -> float:
        """The same where it takes no time to find; else 0."""

    def state_bytes(self, candidate: Candidate) -> float:
        """Bytes that parameters, gradients and optimizer take on its fullest rank at least."""

    def rough_bytes(self, candidate: Candidate) -> float:
        """Estimate of the memory of its fullest rank, for the order of the search."""

    def price(self, candidate: Candidate) -> Price:
        """Its price.

        Raises:
            MerakError: the model or the schedule does not allow it.
        """

    @property
    def device_bytes(self) -> float:
        """Bytes that tensors may fill of the largest device."""


@dataclass(frozen=True, slots=True)
class _Form:
    """Seconds of all segments for one microbatch, in one form of the graph.

    Args:
        forward_s: of their forwards.
        backward_s: of their backwards.
        largest_s: of the segment that takes longest.
    """

    forward_s: float
    backward_s: float
    largest_s: float


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
    _forms: dict[tuple[int, int, bool, bool], _Form] = field(init=False, default_factory=dict)
    _bytes: tuple[float, float, float] | None = field(init=False, default=None)
    _saved: dict[int, tuple[float, float, float]] = field(init=False, default_factory=dict)

    @property
    def device_bytes(self) -> float:
        """Bytes that tensors may fill of the largest device."""
        sizes = [own.device.memory_bytes for own in self.cluster.nodes]
        return max(math.inf if size is None else float(usable_bytes(size)) for size in sizes)

    def price(self, candidate: Candidate) -> Price:
        """The price of a candidate."""
        return price(self.workload, self.cluster, candidate)

    def bound_s(self, candidate: Candidate) -> float:
        """Seconds that a candidate's step takes at least."""
        form, count = self._form(candidate), candidate.num_microbatches
        again_s = form.forward_s if candidate.recompute == "full" else 0.0
        whole_s = form.forward_s + form.backward_s + again_s
        least_s = count * max(whole_s / candidate.pp, form.largest_s)
        if candidate.schedule in _FIFO:
            # Stage i takes m·t[i] after the t of those before it; equal where t shrinks by 1 − 1/m.
            shrinks = 1.0 - (1.0 - 1.0 / count) ** candidate.pp
            least_s = max(least_s, whole_s / shrinks)
        return least_s

    def quick_bound_s(self, candidate: Candidate) -> float:
        """The same where the graph is there already; else 0."""
        return self.bound_s(candidate) if _key(candidate) in self._forms else 0.0

    def rough_s(self, candidate: Candidate) -> float:
        """Estimate of a candidate's step, without the graph of another microbatch."""
        scale = candidate.microbatch / self.base
        # Sharding over the sequence moves as many bytes over tp; it is told apart by the price.
        form = self._form(replace(candidate, microbatch=self.base, sequence_parallel=False))
        again = {"full": 1.0, "selective": _SELECTIVE}.get(str(candidate.recompute), 0.0)
        stage_s = (form.forward_s * (1 + again) + form.backward_s) * scale / candidate.pp
        chunks = int(candidate.schedule_options.get("chunks", 1))
        bubble = _BUBBLES.get(candidate.schedule, 1 / chunks) * (candidate.pp - 1)
        pipeline_s = stage_s * (candidate.num_microbatches + bubble)
        return pipeline_s + self._rough_replicas_s(candidate, pipeline_s)

    def _rough_replicas_s(self, candidate: Candidate, pipeline_s: float) -> float:
        """What the exchanges of replicas add, as far as the pipeline does not hide them."""
        if candidate.dp == 1:
            return 0.0
        replicas = group_of(self.cluster, candidate.dp, candidate.tp)
        share = candidate.tp * candidate.pp
        parameters, gradients, _ = self._state()
        seconds = collective_seconds("all_reduce", gradients / share, replicas)
        hides_s = pipeline_s / candidate.num_microbatches
        if candidate.zero == 3:
            gather_s = collective_seconds("all_gather", parameters / share, replicas)
            seconds += 2 * candidate.num_microbatches * gather_s
            hides_s = pipeline_s
        return max(0.0, seconds - hides_s) + 0.1 * seconds

    def state_bytes(self, candidate: Candidate) -> float:
        """Bytes of parameters, gradients and optimizer on the fullest rank, at least their mean."""
        parameters, gradients, optimizer = self._state()
        dp, zero = candidate.dp, candidate.zero
        held = parameters / (dp if zero == 3 else 1)
        held += gradients / (dp if zero >= 2 else 1)
        held += optimizer / (dp if zero else 1)
        return held / (candidate.tp * candidate.pp)

    def rough_bytes(self, candidate: Candidate) -> float:
        """Estimate of the memory of a candidate's fullest rank."""
        saved, inputs, largest = self._held(candidate.tp)
        scale = candidate.microbatch / self.base
        if candidate.sequence_parallel:
            scale *= _SEQUENCE
        known = {"full": inputs, "selective": _SELECTIVE_SAVES * saved}
        held = known.get(str(candidate.recompute), saved)
        if candidate.schedule in SPLIT:  # which hold what was recomputed until the W
            held = saved
        chunks = int(candidate.schedule_options.get("chunks", 1))
        in_flight = candidate.pp + (candidate.pp - 1) / chunks * (chunks > 1)
        if candidate.schedule == "gpipe":
            in_flight = candidate.num_microbatches
        in_flight = min(in_flight, candidate.num_microbatches)
        activations = scale * (held * in_flight / candidate.pp + largest)
        return self.state_bytes(candidate) + activations

    def _held(self, tp: int) -> tuple[float, float, float]:
        """Bytes that a microbatch of `base` samples holds on one tensor parallel rank.

        Returns:
            Saved activations of all segments, their inputs, and the most of one segment.
        """
        if tp not in self._saved:
            count = len(self.workload.graph(self.base).segments)
            alone = Candidate(tp=tp, microbatch=self.base)
            device = self.cluster.nodes[0].device
            whole = Partition(count, ())
            forecast = self.workload.forecast(alone, whole, device_profile=device)
            sizes, graph = forecast.saved_bytes(), forecast.layout.graph
            inputs = [sum(graph.values[n].num_bytes for n in s.inputs) for s in graph.segments]
            own = [float(size) for size in sizes.values()]
            self._saved[tp] = sum(own), float(sum(inputs)), max(own, default=0.0)
        return self._saved[tp]

    def _state(self) -> tuple[float, float, float]:
        """Bytes of all parameters, their gradients, and optimizer states with masters."""
        if self._bytes is None:
            own = list(self.workload.model.parameters())
            trained = [p for p in own if p.requires_grad]
            counts = Counter(TensorMeta(tuple(p.shape), p.dtype) for p in trained)
            states = optimizer_memory(
                self.workload.optimizer, list(counts), torch.device("cpu")
            ).state_bytes
            optimizer = float(sum(n * size for n, size in zip(counts.values(), states)))
            if self.workload.master_weights:
                optimizer += sum(4.0 * p.numel() for p in trained if is_low_precision(p))
            gradients = float(sum(p.nbytes for p in trained))
            self._bytes = (float(sum(p.nbytes for p in own)), gradients, optimizer)
        return self._bytes

    def _form(self, candidate: Candidate) -> _Form:
        split = candidate.sub_pipelining == "on"
        key = _key(candidate)
        if key not in self._forms:
            group = group_of(self.cluster, candidate.tp, 1)
            found = [
                _form(price_segments(self.workload, candidate, own.device, group), split)
                for own in self.cluster.nodes
            ]
            self._forms[key] = _Form(
                min(own.forward_s for own in found),
                min(own.backward_s for own in found),
                min(own.largest_s for own in found),
            )
        return self._forms[key]


def _key(candidate: Candidate) -> tuple[int, int, bool, bool]:
    split = candidate.sub_pipelining == "on"
    return candidate.microbatch, candidate.tp, candidate.sequence_parallel, split


def _form(prices: tuple[SegmentPrice, ...], split: bool) -> _Form:
    """Times of segments; without collectives, which others may hide, where they are split."""
    times = [(_seconds(own.forward, split), _backward_s(own, split)) for own in prices]
    return _Form(
        sum(forward for forward, _ in times),
        sum(backward for _, backward in times),
        max((forward + backward for forward, backward in times), default=0.0),
    )


def _seconds(steps: tuple[tuple[float, float], ...], split: bool) -> float:
    return sum(compute_s + (0.0 if split else collective_s) for compute_s, collective_s in steps)


def _backward_s(own: SegmentPrice, split: bool) -> float:
    apart = _seconds(own.input_gradient, split) + _seconds(own.weight_gradient, split)
    return min(_seconds(own.backward, split), apart)
