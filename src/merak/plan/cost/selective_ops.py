"""Selective recomputation: operators whose results a recomputed segment saves all the same.

They take long to recompute and few bytes to save. No operator is known by name: its time comes from
the cost model, the bytes of its results from a run on fake tensors. Attention by a fused kernel,
for example, is worth saving, and the same attention with all its scores is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from merak.core.storages import Storages
from merak.graph.ir.ir import Segment
from merak.graph.ir.mutation import find_mutations
from merak.graph.program.selective import save_operators
from merak.plan.cost.device import DeviceProfile
from merak.plan.cost.operators import node_work, outputs
from merak.plan.cost.segment_memory import FakeRun, MeasuredGraphs
from merak.plan.cost.segment_time import work_seconds


@dataclass(frozen=True, slots=True)
class SelectiveOps:
    """Operators of a segment whose results are saved where it recomputes.

    Args:
        names: of their nodes.
        time_fraction: their fraction of the segment's forward time.
        saved_bytes: their results of a microbatch.
        forward_bytes: peak of the forward that saves them.
        replay_bytes: peak of the recomputation beyond the saved results.
        replayed_bytes: held after the recomputation, saved results and outputs included.
    """

    names: frozenset[str]
    time_fraction: float
    saved_bytes: int
    forward_bytes: int
    replay_bytes: int
    replayed_bytes: int


def find_selective_ops(
    segments: Sequence[tuple[Segment, int]],
    profile: DeviceProfile,
    device: torch.device,
    graphs: MeasuredGraphs | None = None,
    ranks: object = None,
) -> dict[int, SelectiveOps]:
    """Operators worth saving, for those segments that have any.

    An operator is worth it if saving its results spares more time per byte than saving all of the
    segment's activations.

    Args:
        segments: local to the pp rank, each with the bytes that it saves besides its inputs and
            outputs.
        profile: the device's speeds.
        device: of the fake tensors.
        graphs: what earlier calls have found; gains what this one does.
        ranks: the degrees of the layout.

    Returns:
        By segment number.
    """
    graphs = MeasuredGraphs() if graphs is None else graphs
    known: dict[object, tuple[SelectiveOps | None, Segment, DeviceProfile]] = graphs.found
    found: dict[int, SelectiveOps] = {}
    for segment, saved_bytes in segments:
        key = graphs.key(segment, (saved_bytes, id(profile), device.type), ranks)
        if key not in known:  # the profile is held, so that no other gets its identity
            known[key] = (_find(segment, saved_bytes, profile, device), segment, profile)
        ops, like, _ = known[key]
        if ops is not None:
            renamed = dict(zip(_names(like.graph), _names(segment.graph), strict=True))
            names = frozenset(renamed[name] for name in ops.names)
            found[segment.index] = replace(ops, names=names)
    return found


def _names(graph: fx.Graph) -> list[str]:
    return [node.name for node in graph.nodes]


def _find(
    segment: Segment, saved_bytes: int, profile: DeviceProfile, device: torch.device
) -> SelectiveOps | None:
    sizes, fraction = _worthwhile(segment, saved_bytes, profile, device)
    if not sizes:
        return None
    return _measure(segment, frozenset(sizes), fraction, device, profile.device_type)


def _worthwhile(
    segment: Segment, saved_bytes: int, profile: DeviceProfile, device: torch.device
) -> tuple[Mapping[str, int], float]:
    """Bytes of the results that are worth saving, and the part of the forward that they take."""
    seconds = {
        node.name: sum(
            work_seconds(kernel, profile) for kernel in node_work(node, profile.device_type).forward
        )
        for node in segment.graph.nodes
    }
    whole_s = sum(seconds.values())
    worth = whole_s / max(saved_bytes, 1)
    num_bytes = _recorded_bytes(segment, _candidates(segment.graph), device, profile.device_type)
    found = {name: size for name, size in num_bytes.items() if seconds[name] > worth * size}
    return found, sum(seconds[name] for name in found) / whole_s if found else 0.0


def _candidates(graph: fx.Graph) -> list[str]:
    """Torch operators whose results require a gradient and are never mutated."""
    written = {n for members in find_mutations(graph).members.values() for n in members}
    return [
        node.name
        for node in graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
        and node not in written
        and any(meta.requires_grad for meta in outputs(node))
    ]


def _recorded_bytes(
    segment: Segment, names: Sequence[str], device: torch.device, kernels: str
) -> Mapping[str, int]:
    """Bytes that saving each of some operators would hold; without views and unsavable ones."""
    local, saved = save_operators(segment, names)
    with torch.enable_grad(), saved.recording(device) as recording:
        FakeRun(local, device, kernels).call()
    sizes = {name: recording.num_bytes(name) for name in recording.results}
    return {name: size for name, size in sizes.items() if size}


def _measure(
    segment: Segment, names: frozenset[str], fraction: float, device: torch.device, kernels: str
) -> SelectiveOps:
    local, saved = save_operators(segment, names)
    run = FakeRun(local, device, kernels)
    with torch.enable_grad(), Storages(run.arguments) as storages:
        with saved.recording(device) as recording:
            run.call()
        forward_bytes, saved_bytes = storages.peak_bytes, storages.live_bytes
        storages.restart()
        with saved.replaying(recording, device):
            outputs = run.call()
        taken = storages.peak_bytes - saved_bytes
        replayed_bytes = storages.live_bytes
        del outputs
    return SelectiveOps(names, fraction, saved_bytes, forward_bytes, taken, replayed_bytes)
