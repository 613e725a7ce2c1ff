"""What a walk through a rank's steps needs to know besides the steps; see `timeline`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import Kind as ValueKind
from merak.graph.program.program import Program, SegmentProgram
from merak.plan.cost.segment_memory import SegmentMemory
from merak.plan.cost.selective_ops import Dear
from merak.plan.memory.zero import Sharing
from merak.schedule.ir import Schedule


@dataclass(frozen=True, slots=True)
class SharedHere:
    """A parameter that several segments read, as one pipe sees it from this rank.

    Args:
        first: the first segment here that reads it.
        owned: whether this rank has the first segment of all, and so sums what the others send.
        num_holders: how many ranks of the pipe read it.
        open_sends: gradients of it that this rank may have sent and not yet seen taken.
    """

    first: int
    owned: bool
    num_holders: int
    open_sends: int = 0


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a rank's walk needs to know besides its steps.

    Args:
        rank: the pipeline position.
        schedule: the schedule, with the stages that recompute anything.
        program: the rank's stages, with the segments that keep their activations.
        memory: what each segment needs, by its number.
        partly: by segment that recomputes, the operators whose results it keeps.
        derived_bytes: of the batch-only values of a microbatch.
        shared: parameters that several segments read, by name and pipe.
        sharing: what of gradients and optimizer each replica holds.
        bucket_bytes: gradients of parameters of so many bytes are summed over replicas as soon as
            they are final; None where nobody else holds the rank's stages.
        every_microbatch: whether gradients of shared parameters travel after every microbatch.
        open_sends: sends of a rank whose buffers may be held at a time.
    """

    rank: int
    schedule: Schedule
    program: Program
    memory: Mapping[int, SegmentMemory]
    partly: Mapping[int, Dear]
    derived_bytes: int
    shared: Mapping[tuple[str, int], SharedHere]
    sharing: Sharing
    bucket_bytes: int | None
    every_microbatch: bool
    open_sends: int

    def in_shares(self) -> dict[str, TensorMeta]:
        """Parameters of which replicas hold shares: all that have rows."""
        if not self.sharing.parameters:
            return {}
        return {n: m for n, m in parameters_of(self.program).items() if m.shape}


def trained(segment: SegmentProgram) -> list[str]:
    """Names of the parameters that a segment gives gradients to."""
    nodes = segment.segment.graph.find_nodes(op="placeholder")
    parameters = [node for node in nodes if node.meta["kind"] is ValueKind.PARAMETER]
    return [n.meta["name"] for n in parameters if n.meta["tensor"].requires_grad]


def parameters_of(program: Program) -> dict[str, TensorMeta]:
    """What this rank's share of each parameter is that its segments read."""
    return {
        node.meta["name"]: node.meta["tensor"]
        for stage in program.stages.values()
        for segment in stage.segments
        for node in segment.segment.graph.find_nodes(op="placeholder")
        if node.meta["kind"] is ValueKind.PARAMETER
    }
