"""A model as a tensor parallel rank runs it, compiled and measured once for all its layouts."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import fx

from merak.core.shards import ParameterShard
from merak.graph.chunked_loss import RankRewrite
from merak.graph.ir.ir import ModelGraph, Segment
from merak.graph.ir.structure import note_copy
from merak.graph.program.codegen import Function, runnable
from merak.graph.program.program import (
    Compiler,
    Program,
    Rewrite,
    SegmentProgram,
    compile_program,
    compile_segment,
    has_draws,
)
from merak.graph.segment.repeated import labels, renamed
from merak.plan.cost.optimizer_memory import OptimizerMemories
from merak.plan.cost.segments.measured import MeasuredGraphs, SegmentMemories
from merak.plan.memory.measured import Measured
from merak.plan.memory.sub_pipelined import SplitSegments


class LocalModel:
    """Segments of a tensor parallel rank, which all layouts with the same shards have in common.

    Args:
        graph: the whole model at one microbatch.
        rewrite: the tensor parallel rewrite of its segments; None without tensor parallelism.
        device: of fake tensors.
        optimizers: measures the optimizer.
        graphs: what is known of other layouts, and gains what is measured here.
        ranks: the degrees of the layout.
    """

    def __init__(
        self,
        graph: ModelGraph,
        rewrite: RankRewrite | None,
        device: torch.device,
        optimizers: OptimizerMemories,
        graphs: MeasuredGraphs | None = None,
        ranks: Hashable = None,
    ) -> None:
        self._graphs = MeasuredGraphs() if graphs is None else graphs
        self._ranks = ranks
        self.whole = graph
        self.rewrite = rewrite
        self._rewrites: list[Rewrite] = []
        self.graph = graph
        fitted: RankRewrite | None = None
        if rewrite is not None:
            self.graph, fitted = rewrite.fit(graph)
            self._rewrites = [fitted]
        self._compiler = _CompilerOnce(self.graph, fitted)
        self.split = SplitSegments(graph, self.graph, self._rewrites)
        self.device = device
        self.optimizers = optimizers
        self._measured: dict[tuple[bool, str | None], Measured] = {}

    @property
    def segments(self) -> tuple[Segment, ...]:
        """All segments, of the rank's shapes."""
        compiled = (self._compiler.segment(s, self._rewrites) for s in self.graph.segments)
        return tuple(program.segment for program, _ in compiled)

    def program(self, bounds: Sequence[int], stages: Sequence[int]) -> Program:
        """Program of a pp rank, whose functions are made when they are first called.

        Args:
            bounds: first segment of each stage, and the number of segments at the end.
            stages: those of the rank.
        """
        rewrites = {stage: self._rewrites for stage in stages}
        return compile_program(self.graph, bounds, rewrites, compiler=self._compiler)

    def measured(self, float32_gradients: bool, kernels: str | None = None) -> Measured:
        """Memory of the segments and the optimizer.

        Args:
            float32_gradients: whether gradients of low precision are accumulated in float32.
            kernels: type of the device whose kernels run; None for `device`'s.
        """
        key = (float32_gradients, kernels)
        if key not in self._measured:
            how = (self.device, float32_gradients, kernels, self._graphs, self._ranks)
            self._measured[key] = Measured(SegmentMemories(*how), self.optimizers)
        return self._measured[key]


class _CompilerOnce(Compiler):
    """Compiler that compiles every segment of a graph once, under the same rewrites.

    Of segments whose rewriting differs in names alone, one is rewritten and the others are copies.

    Args:
        graph: the whole model, of the rank's values between segments.
        rewrite: the fitted rewrite of its segments; None without one.
    """

    def __init__(self, graph: ModelGraph, rewrite: RankRewrite | None) -> None:
        super().__init__(graph)
        self._rewrite = rewrite
        self._segments: dict[int, tuple[SegmentProgram, dict[str, ParameterShard]]] = {}
        self._first: dict[Hashable, tuple[Segment, Segment, dict[str, ParameterShard]]] = {}
        self._prologues: dict[frozenset[str], tuple[SegmentProgram, SegmentProgram]] = {}

    def segment(
        self,
        segment: Segment,
        rewrites: Sequence[Rewrite],
        selective: Container[str] = (),
        yields: bool = False,
    ) -> tuple[SegmentProgram, dict[str, ParameterShard]]:
        """Program of a segment, and how its parameters are split over tp."""
        assert not selective, "a forecast has the operators that are saved apart"
        if segment.index not in self._segments:
            local, shards = self._local(segment)
            draws, values = has_draws(segment), self.graph.values
            self._segments[segment.index] = compile_segment(local, values, draws, _lazy), shards
        return self._segments[segment.index]

    def _local(self, segment: Segment) -> tuple[Segment, dict[str, ParameterShard]]:
        """A segment as the rank runs it."""
        if self._rewrite is None:
            return segment, {}
        key = self._rewrite.like(segment)
        if key not in self._first:
            self._first[key] = (segment, *self._rewrite(segment))
        whole, local, shards = self._first[key]
        if whole is segment:
            return local, shards
        names = dict(zip(labels(whole.graph), labels(segment.graph), strict=True))
        graph = renamed(local.graph, names)
        note_copy(graph, local.graph)
        return replace(segment, graph=graph), {names[n]: shard for n, shard in shards.items()}

    def prologues(self, names: frozenset[str]) -> tuple[SegmentProgram, SegmentProgram]:
        """Prologues of a rank that reads some batch-only values."""
        if names not in self._prologues:
            self._prologues[names] = super().prologues(names)
        return self._prologues[names]


def _lazy(graph: fx.Graph) -> Function:
    """Function that runs a graph's operators, made when it is first called."""
    made: Callable[[], Function] = cache(lambda: runnable(graph))
    return lambda *args: made()(*args)
