"""Estimates of what a microbatch holds between forward and backward, for the order of a search.

They take one run of every different segment on fake tensors, where its memory takes six, and its
selective operators, which prices share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from merak.core.mesh import pretended
from merak.graph.ir.ir import Kind, Segment
from merak.graph.ir.operators import family
from merak.plan.cost.device import DeviceProfile
from merak.plan.cost.segment_memory import saved_and_outputs
from merak.plan.price.candidate import Candidate, Form
from merak.plan.price.workload import Workload


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes that a microbatch holds on one rank.

    Args:
        saved: between forward and backward, by recomputation; without `weight_copies`.
        largest: most that one segment saves, without them.
        weight_copies: copies of weights in autocast's type that a forward saves where nothing is
            recomputed: as many for a microbatch of any size.
    """

    saved: Mapping[str, float]
    largest: float
    weight_copies: float = 0.0


def held_of(workload: Workload, device: DeviceProfile, form: Form) -> Held:
    """Estimate what a microbatch of some samples holds.

    Args:
        workload: the model.
        device: whose kernels run.
        form: the microbatch, and the degrees that its graph depends on.
    """
    graph, local = workload.local_graph(form), workload.local_model(form)
    fake = local.device
    float32 = workload.options(Candidate()).float32_gradients
    measured = local.measured(float32, device.device_type)
    first = workload.unique(form)
    known: dict[int, tuple[int, int, int]] = {}
    with pretended(Candidate(tp=form.tp, cp=form.cp, ep=form.ep).mesh(0, workload.device)):
        for index in sorted(set(first)):
            segment = graph.segments[index]
            saved, outputs = saved_and_outputs(segment, fake, device.device_type)
            trains = any(graph.values[name].requires_grad for name in segment.outputs)
            found = measured.selective([(segment, saved)] if trains else [], device, fake)
            copies = min(saved, _weight_copies(segment)) if trains else 0
            selective = sum(own.saved_bytes for own in found.values())
            known[index] = saved - copies + outputs, selective, copies
    inputs = sum(graph.values[name].num_bytes for own in graph.segments for name in own.inputs)
    saved_bytes = {
        "off": float(sum(known[index][0] for index in first)),
        "selective": float(inputs + sum(known[index][1] for index in first)),
        "full": float(inputs),
    }
    largest = max((own for own, _, _ in known.values()), default=0)
    return Held(saved_bytes, float(largest), float(sum(known[index][2] for index in first)))


def _weight_copies(segment: Segment) -> int:
    """Bytes of the copies of a segment's weights in another element type."""
    copies = 0
    for node in segment.graph.find_nodes(op="placeholder"):
        if node.meta["kind"] is Kind.PARAMETER:
            converted = (user for user in node.users if family(user.target) == "to")
            copies += sum(user.meta["tensor"].num_bytes for user in converted)
    return copies
