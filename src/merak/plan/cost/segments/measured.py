"""Memory of segments, found once for those with equal graphs, such as blocks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from merak.graph.ir.ir import Segment
from merak.graph.ir.operators import is_aten_alone
from merak.graph.ir.structure import Structure, structure_of_graph
from merak.graph.joint.derive import JointGraph
from merak.plan.cost.joint_operators import JointParts, parts_of_segment
from merak.plan.cost.segments.by_autograd import memory_by_autograd, saved_and_outputs
from merak.plan.cost.segments.by_graph import (
    held_by_graph,
    joint_graph_of,
    joint_graphs_in_turns,
    memory_by_graph,
)
from merak.plan.cost.segments.memory import SegmentMemory

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class MeasuredGraphs:
    """Memory measured by runs on fake tensors, for several layouts of one model.

    Args:
        found: by what was measured, the ranks of the layout where the graph depends on them, and
            the graph's structure.
    """

    found: dict[Any, Any] = field(default_factory=dict)
    _alone: dict[Structure, bool] = field(default_factory=dict)

    def key(self, segment: Segment, what: Any, ranks: Any) -> Any:
        """Key of a segment in `found`.

        Args:
            segment: the segment.
            what: is measured.
            ranks: the degrees that collectives of the segment depend on.
        """
        structure = structure_of_graph(segment.graph)
        if structure not in self._alone:
            self._alone[structure] = is_aten_alone(segment.graph)
        return (what, None if self._alone[structure] else ranks, structure)


class SegmentMemories:
    """Finds the memory of segments; of those with equal graphs, such as blocks, only once.

    Args:
        device: type of the device, on which the choice of kernels depends.
        float32_gradients: whether gradients of low precision are accumulated in float32.
        kernels: type of the device whose kernels run, which need not be here; None for `device`'s.
        graphs: what is known of other layouts, and gains what is found here.
        ranks: the degrees of the layout.
    """

    def __init__(
        self,
        device: torch.device,
        float32_gradients: bool = True,
        kernels: str | None = None,
        graphs: MeasuredGraphs | None = None,
        ranks: Any = None,
    ) -> None:
        self.device = device
        self._kernels = kernels or device.type
        self.float32_gradients = float32_gradients
        self._graphs = MeasuredGraphs() if graphs is None else graphs
        self._ranks = ranks
        self._in_turns: dict[int, list[JointGraph]] = {}

    def __call__(self, segment: Segment, immediate: Collection[str] = ()) -> SegmentMemory:
        """Memory of a segment, by the shapes in its graph.

        Args:
            segment: the segment.
            immediate: names of parameters whose gradients are never left for later.
        """
        own = tuple(n for n, name in enumerate(segment.parameters) if name in immediate)

        def find(one: Segment) -> SegmentMemory:
            joint = self.joint(one)
            if joint is None:
                given = one, self.device, self._kernels, self.float32_gradients
                return replace(memory_by_autograd(*given), obstacle=self.obstacle(one))
            names = [one.parameters[number] for number in own]
            return memory_by_graph(one, [joint], self.float32_gradients, names)

        memory, known = self.once(segment, ("memory", self.float32_gradients, own), find)
        return memory.renamed(values_of(known, segment))

    def held(self, segment: Segment) -> tuple[int, int]:
        """Bytes that a segment saves of a microbatch for its backward, and those of its outputs."""

        def find(one: Segment) -> tuple[int, int]:
            joint = self.joint(one)
            if joint is None:
                return saved_and_outputs(one, self.device, self._kernels)
            return held_by_graph(one, joint)

        return self.once(segment, "held", find)[0]

    def in_turns(
        self,
        segment: Segment,
        pair: Sequence[Segment],
        immediate: Collection[str] = (),
        joined: Collection[str] = (),
        keeps: Collection[str] = (),
    ) -> SegmentMemory | None:
        """Memory of a segment whose sub-microbatches run in turns; None where autograd runs it.

        Of the whole segment, its outputs and which operators are recomputed say more.

        Args:
            segment: for a whole microbatch.
            pair: for each sub-microbatch.
            immediate: as for one that runs whole.
            joined: names of outputs that are put together of both for others.
            keeps: names of the operators whose results are kept where others are recomputed.
        """
        if segment.index not in self._in_turns:
            self._in_turns[segment.index] = joint_graphs_in_turns(pair, self.device, self._kernels)
        joints = self._in_turns[segment.index]
        if len(joints) < len(pair):
            return None
        own = (pair[0], joints, self.float32_gradients, immediate)
        return memory_by_graph(*own, keeps, joined)

    def joint(self, segment: Segment) -> JointGraph | None:
        """Joint graph of a segment; None where autograd runs its backward."""
        found = self._joint(segment)
        return None if isinstance(found, str) else found

    def obstacle(self, segment: Segment) -> str:
        """Why autograd runs the backward of a segment; "" where that is a graph."""
        found = self._joint(segment)
        return found if isinstance(found, str) else ""

    def _joint(self, segment: Segment) -> JointGraph | str:
        def find(one: Segment) -> JointGraph | str:
            return joint_graph_of(one, self.device, self._kernels)

        return self.once(segment, "joint", find)[0]

    def joint_parts(self, segment: Segment) -> JointParts | None:
        """Parts of the joint graph of a segment, or of one that is alike; None as of `joint`."""

        def find(one: Segment) -> JointParts | None:
            joint = self.joint(one)
            return None if joint is None else parts_of_segment(one, joint)

        return self.once(segment, "joint parts", find)[0]

    def once(
        self, segment: Segment, what: Hashable, find: Callable[[Segment], T]
    ) -> tuple[T, Segment]:
        """What is found of a segment, and the first one that is alike, of which it was.

        Args:
            segment: the segment.
            what: is found.
            find: finds it.
        """
        how = (what, self.device.type, self._kernels)
        key, graphs = self._graphs.key(segment, how, self._ranks), self._graphs.found
        if key not in graphs:
            graphs[key] = (find(segment), segment)
        found: tuple[T, Segment] = graphs[key]
        return found


def values_of(known: Segment, segment: Segment) -> dict[str, str]:
    """Names of a segment's inputs and outputs, by those of one that is alike."""
    pairs = zip(known.inputs + known.outputs, segment.inputs + segment.outputs, strict=True)
    return dict(pairs)
