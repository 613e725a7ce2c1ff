"""Measured memory of segments, prologues and optimizers, each once for all layouts of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from merak.graph.ir.ir import Segment
from merak.graph.ir.structure import structure_of_graph
from merak.graph.program.program import Program, SegmentProgram
from merak.plan.cost.device import DeviceProfile
from merak.plan.cost.optimizer_memory import OptimizerMemories
from merak.plan.cost.segment_memory import (
    MeasuredGraphs,
    SegmentMemories,
    SegmentMemory,
    storage_bytes,
)
from merak.plan.cost.selective_ops import SelectiveOps, find_selective_ops


class Measured:
    """Memory of the segments that a tensor parallel rank may hold, measured when first asked for.

    Segments are told apart by their number, so all of them are those of one graph.

    Args:
        segments: measures a segment, on the device of the job.
        optimizers: measures the optimizer.
        graphs: what is known of other layouts, and gains what is measured here.
        ranks: the degrees of the layout.
    """

    def __init__(
        self,
        segments: SegmentMemories,
        optimizers: OptimizerMemories,
        graphs: MeasuredGraphs | None = None,
        ranks: Any = None,
    ) -> None:
        self.optimizers = optimizers
        self._measure = segments
        self._segments: dict[int, SegmentMemory] = {}
        self._prologues: dict[Any, int] = {}
        self._graphs = MeasuredGraphs() if graphs is None else graphs
        self._ranks = ranks

    def selective(
        self, segments: Sequence[tuple[Segment, int]], profile: DeviceProfile, device: torch.device
    ) -> dict[int, SelectiveOps]:
        """Operators that are worth saving; arguments as of `find_selective_ops`."""
        return find_selective_ops(segments, profile, device, self._graphs, self._ranks)

    def segment(self, segment: Segment) -> SegmentMemory:
        """Memory of a segment for one microbatch."""
        if segment.index not in self._segments:
            self._segments[segment.index] = self._measure(segment)
        return self._segments[segment.index]

    def piece(self, piece: Segment) -> SegmentMemory:
        """Memory of a piece of a segment, which has the segment's number."""
        return self._measure(piece)

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
