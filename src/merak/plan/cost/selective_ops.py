"""Which operators of a recomputed segment are worth keeping: dear to compute, cheap to store.

No operator is known by name. What it takes to compute one again comes from the cost model, what its
results hold from a run on tensors without numbers: attention by a fused kernel, for example, is
long to compute and small to keep, and the same attention with all its scores is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from merak.graph.ir.ir import Segment
from merak.graph.ir.mutation import find_mutations
from merak.graph.program.selective import save_operators
from merak.plan.cost.device import DeviceProfile
from merak.plan.cost.live_storages import Storages
from merak.plan.cost.operators import node_work, outputs
from merak.plan.cost.segment_memory import FakeRun, likeness
from merak.plan.cost.segment_time import work_seconds


@dataclass(frozen=True, slots=True)
class Dear:
    """The operators of a segment that are worth keeping where it recomputes.

    Args:
        names: of their nodes.
        saved_share: their part of the segment's forward time.
        held_bytes: of their results for a microbatch.
        forward_bytes: the most that a forward which records them takes while it runs.
        replay_bytes: the most that the second forward takes beyond what has been kept.
        replayed_bytes: what is held after it, the kept results and the outputs included.
    """

    names: frozenset[str]
    saved_share: float
    held_bytes: int
    forward_bytes: int
    replay_bytes: int
    replayed_bytes: int


def find_dear(
    segments: Sequence[tuple[Segment, int]], profile: DeviceProfile, device: torch.device
) -> dict[int, Dear]:
    """The operators worth keeping, for those segments that have any.

    An operator is worth it if keeping its results saves more time per byte than keeping all of the
    segment's activations.

    Args:
        segments: as this position runs them, each with the bytes that it saves beyond its inputs
            and outputs.
        profile: the device's speeds.
        device: where the tensors without numbers claim to be.

    Returns:
        By segment number.
    """
    known: dict[object, tuple[Dear | None, Segment]] = {}
    found: dict[int, Dear] = {}
    for segment, saved_bytes in segments:
        key = likeness(segment.graph)
        if key not in known:
            known[key] = (_find(segment, saved_bytes, profile, device), segment)
        dear, like = known[key]
        if dear is not None:
            renamed = dict(zip(_names(like.graph), _names(segment.graph), strict=True))
            names = frozenset(renamed[name] for name in dear.names)
            found[segment.index] = replace(dear, names=names)
    return found


def _names(graph: fx.Graph) -> list[str]:
    return [node.name for node in graph.nodes]


def _find(
    segment: Segment, saved_bytes: int, profile: DeviceProfile, device: torch.device
) -> Dear | None:
    seconds = {
        node.name: sum(
            work_seconds(kernel, profile) for kernel in node_work(node, profile.device_type).forward
        )
        for node in segment.graph.nodes
    }
    worth = sum(seconds.values()) / max(saved_bytes, 1)
    num_bytes = _recorded_bytes(segment, _candidates(segment.graph), device)
    names = frozenset(name for name, size in num_bytes.items() if seconds[name] > worth * size)
    if not names:
        return None
    share = sum(seconds[name] for name in names) / sum(seconds.values())
    return _measure(segment, names, share, device)


def _candidates(graph: fx.Graph) -> list[str]:
    """Operators of torch's whose results a gradient flows through and nobody writes into."""
    written = {n for members in find_mutations(graph).members.values() for n in members}
    return [
        node.name
        for node in graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
        and node not in written
        and any(meta.requires_grad for meta in outputs(node))
    ]


def _recorded_bytes(
    segment: Segment, names: Sequence[str], device: torch.device
) -> Mapping[str, int]:
    """What each of some operators would hold; views, and what cannot be kept, are left out."""
    local, kept = save_operators(segment, names)
    with torch.enable_grad(), kept.recording(device) as recording:
        FakeRun(local, device).call()
    sizes = {name: recording.num_bytes(name) for name in recording.results}
    return {name: size for name, size in sizes.items() if size}


def _measure(segment: Segment, names: frozenset[str], share: float, device: torch.device) -> Dear:
    local, kept = save_operators(segment, names)
    run = FakeRun(local, device)
    with torch.enable_grad(), Storages(run.arguments) as storages:
        with kept.recording(device) as recording:
            run.call()
        forward_bytes, held_bytes = storages.peak_bytes, storages.live_bytes
        storages.restart()
        with kept.replaying(recording, device):
            outputs = run.call()
        taken = storages.peak_bytes - held_bytes
        replayed_bytes = storages.live_bytes
        del outputs
    return Dear(names, share, held_bytes, forward_bytes, taken, replayed_bytes)
