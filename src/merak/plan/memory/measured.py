"""Measured memory of segments, prologues and optimizers, each once for all layouts of a model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from merak.graph.ir.ir import Segment
from merak.graph.ir.structure import structure_of_graph
from merak.graph.program.program import Program, SegmentProgram
from merak.plan.cost.device import DeviceProfile
from merak.plan.cost.joint_operators import JointParts
from merak.plan.cost.kernels.kernel_time import operator_seconds
from merak.plan.cost.optimizer_memory import OptimizerMemories
from merak.plan.cost.segments.by_autograd import storage_bytes
from merak.plan.cost.segments.measured import SegmentMemories
from merak.plan.cost.segments.memory import SegmentMemory
from merak.plan.cost.selective_ops import SelectiveOps, find_selective_ops


class Measured:
    """Memory of the segments that a tensor parallel rank may hold, measured when first asked for.

    Segments are told apart by their number, so all of them are those of one graph.

    Args:
        segments: measures a segment, on the device of the job.
        optimizers: measures the optimizer.
    """

    def __init__(
        self,
        segments: SegmentMemories,
        optimizers: OptimizerMemories,
    ) -> None:
        self.optimizers = optimizers
        self._measure = segments
        self._segments: dict[tuple[int, frozenset[str]], SegmentMemory] = {}
        self._in_turns: dict[Any, SegmentMemory | None] = {}
        self._prologues: dict[Any, int] = {}

    def selective(
        self, segments: Sequence[tuple[Segment, int]], profile: DeviceProfile
    ) -> dict[int, SelectiveOps]:
        """Operators that are worth saving; arguments as of `find_selective_ops`."""
        return find_selective_ops(segments, profile, self._measure)

    def operator_seconds(self, segment: Segment, profile: DeviceProfile) -> Sequence[float]:
        """Estimated seconds of each node of a segment's graph in a forward."""

        def find(one: Segment) -> tuple[Sequence[float], DeviceProfile]:
            return operator_seconds(one.graph, profile), profile

        # The profile is held, so that no other gets its identity.
        return self._measure.once(segment, ("seconds", id(profile)), find)[0][0]

    def segment(self, segment: Segment, immediate: Collection[str] = ()) -> SegmentMemory:
        """Memory of a segment for one microbatch; arguments as of `SegmentMemories`."""
        key = segment.index, frozenset(immediate)
        if key not in self._segments:
            self._segments[key] = self._measure(segment, immediate)
        return self._segments[key]

    def held(self, segment: Segment) -> tuple[int, int]:
        """What a segment holds of a microbatch, as of `SegmentMemories`."""
        return self._measure.held(segment)

    def joint_parts(self, segment: Segment) -> JointParts | None:
        """Parts of a segment's joint graph; as of `SegmentMemories.joint_parts`."""
        return self._measure.joint_parts(segment)

    def in_turns(
        self,
        segment: Segment,
        pair: tuple[Segment, Segment],
        immediate: tuple[str, ...],
        joined: tuple[str, ...],
        keeps: frozenset[str],
    ) -> SegmentMemory | None:
        """Memory of a segment in sub-microbatches; as of `SegmentMemories.in_turns`."""
        key = segment.index, immediate, joined, keeps
        if key not in self._in_turns:
            self._in_turns[key] = self._measure.in_turns(segment, pair, immediate, joined, keeps)
        return self._in_turns[key]

    def prologue_bytes(self, program: Program) -> tuple[int, int]:
        """Bytes of batch-only values that are held throughout, and of those of one microbatch."""
        return self._outputs_bytes(program.fixed), self._outputs_bytes(program.batch_only)

    def _outputs_bytes(self, prologue: SegmentProgram) -> int:
        segment = prologue.segment
        if not segment.outputs:
            return 0
        key = structure_of_graph(segment.graph)
        if key not in self._prologues:
            sizes = storage_bytes(segment, self._measure.device)
            self._prologues[key] = sum(sizes.values())
        return self._prologues[key]
