"""Context of a rank's memory timeline: its program, schedule, tied parameters and ZeRO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import Kind as ValueKind
from merak.graph.program.program import Program, SegmentProgram
from merak.plan.cost.segments.memory import SegmentMemory
from merak.plan.cost.selective_ops import SelectiveOps
from merak.plan.memory.zero import ZeroSharding
from merak.schedule.ir import Schedule


@dataclass(frozen=True, slots=True)
class TiedParameter:
    """A parameter that several segments of a pipe read, one of them on this rank.

    Args:
        first: the first segment of this rank that reads it.
        owned: whether this rank has the first reader of all, which sums the gradients of the
            others.
        num_holders: ranks of the pipe that read it.
        open_sends: gradients of it that this rank may have sent and that are not yet received.
    """

    first: int
    owned: bool
    num_holders: int
    open_sends: int = 0


@dataclass(frozen=True, slots=True)
class MemoryContext:
    """Everything that a rank's memory timeline depends on besides its steps.

    Args:
        rank: the pp rank.
        schedule: the schedule, with the recompute flags of its stages.
        program: the rank's stages, with the segments that save their activations.
        memory: bytes of each segment, by its number.
        selective: by recomputed segment, the operators whose results are saved.
        derived_bytes: batch-only values of a microbatch.
        tied: tied parameters by name and pipe.
        zero: what replicas shard of parameters, gradients and optimizer state.
        bucket_bytes: size of the buckets in which final gradients are reduced over replicas; None
            where the rank's stages have no replicas.
        every_microbatch: whether gradients of tied parameters are exchanged after every microbatch.
        has_levels: whether replicas reduce by hierarchy.
    """

    rank: int
    schedule: Schedule
    program: Program
    memory: Mapping[int, SegmentMemory]
    selective: Mapping[int, SelectiveOps]
    derived_bytes: int
    tied: Mapping[tuple[str, int], TiedParameter]
    zero: ZeroSharding
    bucket_bytes: int | None
    every_microbatch: bool
    has_levels: bool = False

    def sharded_parameters(self) -> dict[str, TensorMeta]:
        """Parameters that ZeRO-3 shards: all that have rows, and that other replicas have too."""
        if not self.zero.parameters:
            return {}
        metas = parameters_of(self.program)
        return {n: m for n, m in metas.items() if m.shape and self.zero.degree_of(n) > 1}


def trained_parameters(segment: SegmentProgram) -> list[str]:
    """Names of the parameters whose gradients a segment computes."""
    nodes = segment.segment.graph.find_nodes(op="placeholder")
    parameters = [node for node in nodes if node.meta["kind"] is ValueKind.PARAMETER]
    return [n.meta["name"] for n in parameters if n.meta["tensor"].requires_grad]


def parameters_of(program: Program) -> dict[str, TensorMeta]:
    """Shape and element type of this rank's shard of each parameter that its segments read."""
    return {
        node.meta["name"]: node.meta["tensor"]
        for stage in program.stages.values()
        for segment in stage.segments
        for node in segment.segment.graph.find_nodes(op="placeholder")
        if node.meta["kind"] is ValueKind.PARAMETER
    }
