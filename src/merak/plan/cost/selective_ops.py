"""Selective recomputation: operators whose results a recomputed segment saves all the same.

They take long to recompute and few bytes to save. No operator is known by name: its time comes from
the cost model, the bytes of its results from the segment's joint graph. Attention by a fused
kernel, for example, is worth saving, and the same attention with all its scores is not. A segment
whose backward autograd runs has none: where it does not save its activations, it recomputes whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from merak.graph.ir.ir import Segment
from merak.graph.ir.mutation import find_mutations
from merak.plan.cost.device import DeviceProfile
from merak.plan.cost.kernels.kernel_time import operator_seconds
from merak.plan.cost.operators import outputs
from merak.plan.cost.segments.by_graph import kept_bytes, memory_by_graph
from merak.plan.cost.segments.measured import SegmentMemories, values_of
from merak.plan.cost.segments.memory import SegmentMemory


@dataclass(frozen=True, slots=True)
class SelectiveOps:
    """Operators of a segment whose results are saved where it recomputes.

    Args:
        names: of their nodes.
        memory: of the segment that saves them, which knows what is recomputed all the same.
    """

    names: frozenset[str]
    memory: SegmentMemory

    @property
    def saved_bytes(self) -> int:
        """Their results of a microbatch."""
        return self.memory.kept_bytes


def find_selective_ops(
    segments: Sequence[tuple[Segment, int]], profile: DeviceProfile, memories: SegmentMemories
) -> dict[int, SelectiveOps]:
    """Operators worth saving, for those segments that have any.

    An operator is worth it if saving its results spares more time per byte than saving all of the
    segment's activations.

    Args:
        segments: local to the pp rank, each with the bytes that it saves besides its inputs and
            outputs.
        profile: the device's speeds.
        memories: finds the memory of segments, and knows what earlier calls have found.

    Returns:
        By segment number.
    """
    found: dict[int, SelectiveOps] = {}
    for segment, saved_bytes in segments:

        def find(one: Segment, saved_bytes: int = saved_bytes) -> _Found:
            return _find(one, saved_bytes, profile, memories), profile

        # The profile is held, so that no other gets its identity.
        (ops, _), like = memories.once(segment, (saved_bytes, id(profile)), find)
        if ops is not None:
            nodes = dict(zip(_names(like.graph), _names(segment.graph), strict=True))
            names = frozenset(nodes[name] for name in ops.names)
            memory = ops.memory.renamed(values_of(like, segment))
            found[segment.index] = replace(ops, names=names, memory=memory)
    return found


_Found = tuple[SelectiveOps | None, DeviceProfile]


def _names(graph: fx.Graph) -> list[str]:
    return [node.name for node in graph.nodes]


def _find(
    segment: Segment, saved_bytes: int, profile: DeviceProfile, memories: SegmentMemories
) -> SelectiveOps | None:
    joint = memories.joint(segment)
    if joint is None:
        return None
    of_operators = operator_seconds(segment.graph, profile)
    seconds = dict(zip(_names(segment.graph), of_operators, strict=True))
    worth = sum(of_operators) / max(saved_bytes, 1)
    num_bytes = kept_bytes(joint, _candidates(segment.graph))
    names = frozenset(n for n, size in num_bytes.items() if seconds[n] > worth * size > 0)
    if not names:
        return None
    memory = memory_by_graph(segment, [joint], memories.float32_gradients, keeps=names)
    return SelectiveOps(names, memory)


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
