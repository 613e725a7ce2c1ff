"""Estimates of what a microbatch holds between forward and backward, for the order of a search.

They are read off the joint graph of every different segment, which prices share, and off a run of
its forward on fake tensors where autograd runs its backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from merak.core.mesh import pretended
from merak.graph.ir.ir import ModelGraph, Segment
from merak.graph.ir.structure import Structure, structure_of_graph
from merak.plan.cost.device import DeviceProfile
from merak.plan.price.candidate import Form
from merak.plan.price.workload import Workload


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes that a microbatch holds on one rank.

    Args:
        saved: between forward and backward, by recomputation.
        largest: most that one segment saves.
    """

    saved: Mapping[str, float]
    largest: float


class HeldEstimates:
    """Estimates for a job's forms on one device; segments that forms share are run once.

    Args:
        workload: the model.
        device: whose kernels run.
    """

    def __init__(self, workload: Workload, device: DeviceProfile) -> None:
        self._workload = workload
        self._device = device
        self._forms: dict[Form, Held] = {}
        self._segments: dict[tuple[int, int, int | None, Structure], _HeldSegment] = {}

    def __call__(self, form: Form) -> Held:
        """Estimate what a microbatch of some samples holds.

        Args:
            form: the microbatch, and the degrees that its graph depends on.
        """
        if form not in self._forms:
            self._forms[form] = self._held(form)
        return self._forms[form]

    def _held(self, form: Form) -> Held:
        graph = self._workload.local_graph(form)
        first = self._workload.unique(form)
        with pretended(self._workload.mesh(form)):
            known = {index: self._segment(form, graph, index) for index in sorted(set(first))}
        own = [known[index] for index in first]
        inputs = sum(graph.values[n].num_bytes for s in graph.segments for n in s.inputs)
        saved_bytes = {
            "off": float(sum(segment.saved for segment in own)),
            "selective": float(inputs + sum(segment.selective for segment in own)),
            "full": float(inputs),
        }
        largest = max((segment.saved for segment in own), default=0)
        return Held(saved_bytes, float(largest))

    def _segment(self, form: Form, graph: ModelGraph, index: int) -> _HeldSegment:
        # What another ep changes has stacks of other sizes.
        segment = graph.segments[index]
        key = form.tp, form.cp, form.dp, structure_of_graph(segment.graph)
        if key not in self._segments:
            self._segments[key] = self._run(form, graph, segment)
        return self._segments[key]

    def _run(self, form: Form, graph: ModelGraph, segment: Segment) -> _HeldSegment:
        device, local = self._device, self._workload.local_model(form)
        float32 = self._workload.common.float32_gradients
        measured = local.measured(float32, device.device_type)
        saved, outputs = measured.held(segment)
        trains = any(graph.values[name].requires_grad for name in segment.outputs)
        found = measured.selective([(segment, saved)] if trains else [], device)
        return _HeldSegment(saved + outputs, sum(own.saved_bytes for own in found.values()))


@dataclass(frozen=True, slots=True)
class _HeldSegment:
    """Bytes that one segment holds of a microbatch: as of `Held`, outputs included."""

    saved: int
    selective: int
