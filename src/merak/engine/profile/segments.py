"""Seconds of a model's unique segments, run for real with the engine's own segment code.

A segment gets random parameters and activations of its own shapes, and the columns of a batch. On
a tensor parallel rank's segment, collectives are left out: the planner adds those of the links.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from merak.core.gradients import sum_in_float32
from merak.core.mesh import Mesh, pretended
from merak.core.tensor_meta import TensorMeta
from merak.engine.profile.stopwatch import Stopwatch
from merak.engine.segments import run as run_segment
from merak.engine.segments.context import SegmentContext
from merak.engine.segments.weight_gradients import WeightGradients
from merak.engine.tensors_by_name import TensorDict
from merak.graph.ir.ir import Kind, ModelGraph, Segment
from merak.graph.program.program import (
    Compiler,
    SegmentProgram,
    compile_segment,
    has_draws,
)
from merak.graph.weights.materialize import materialize
from merak.plan.cost.calibration import PassSeconds
from merak.plan.cost.segment_digest import segment_digest, segment_kind, segment_size
from merak.plan.price.candidate import Form
from merak.plan.price.workload import Workload
from merak.plan.profile.profile import SegmentRow

Batch = Callable[[int], Mapping[str, torch.Tensor]]
"""Gives the columns of a microbatch of so many samples."""


def measure_segments(
    workload: Workload, batch: Batch, watch: Stopwatch, microbatch: int, tp: int
) -> Iterator[SegmentRow]:
    """Measure every unique segment of a model.

    Args:
        workload: the model; its buffers are materialised.
        batch: columns.
        watch: measures.
        microbatch: samples.
        tp: tensor parallel degree, as whose first rank segments run.
    """
    device = watch.device
    form = Form(microbatch, tp)
    graph = workload.local_graph(form)
    whole = workload.graph(microbatch)
    first = workload.unique(form)
    model = workload.model
    if any(buffer.is_meta for buffer in model.buffers()):
        materialize(model, [], device=device, seed=0, shards={}, shard_index=0)
    buffers = {n: b.to(device) for n, b in model.named_buffers(remove_duplicate=False)}
    buffers |= {name: constant.to(device) for name, constant in graph.constants.items()}
    columns = {name: column.to(device) for name, column in batch(microbatch).items()}
    with pretended(Mesh(1, tp, 1, 0, device, None)):
        batch_only = _batch_only(graph, buffers, columns)
        for index in sorted(set(first)):
            segment = graph.segments[index]
            draws = has_draws(whole.segments[index])
            inputs = _Inputs(segment, graph, device, buffers, columns, batch_only)
            seconds = _seconds(inputs, watch, draws)
            yield SegmentRow(
                model=type(model).__name__,
                name=segment.name,
                digest=segment_digest(segment.graph),
                kind=segment_kind(segment.graph),
                size=segment_size(segment.graph),
                microbatch=microbatch,
                tp=tp,
                seconds=seconds,
            )


def _batch_only(
    graph: ModelGraph, buffers: Mapping[str, torch.Tensor], columns: Mapping[str, torch.Tensor]
) -> TensorDict:
    """Masks, position ids and the like, which segments read."""
    prologue = compile_segment(graph.prologue, graph.values)
    own = prologue.segment
    if not own.outputs:
        return {}
    with torch.no_grad():
        values = prologue.function(
            *(buffers[name] for name in own.buffers), *(columns[name] for name in own.columns)
        )
    return dict(zip(own.outputs, values, strict=True))


@dataclass(slots=True)
class _Inputs:
    """A segment, and tensors of its shapes.

    Args:
        segment: local to a tensor parallel rank.
        graph: of the model.
        device: that computes.
        buffers: of the model, constants too.
        columns: of a microbatch.
        batch_only: of the microbatch.
    """

    segment: Segment
    graph: ModelGraph
    device: torch.device
    buffers: Mapping[str, torch.Tensor]
    columns: Mapping[str, torch.Tensor]
    batch_only: Mapping[str, torch.Tensor]
    weights: dict[str, torch.Tensor] = field(init=False, default_factory=dict)
    values: TensorDict = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Make parameters and inputs."""
        for node in self.segment.graph.find_nodes(op="placeholder"):
            kind, name, meta = node.meta["kind"], node.meta["name"], node.meta["tensor"]
            if kind is Kind.PARAMETER:
                self.weights[name] = _random(meta, self.device).requires_grad_(meta.requires_grad)
            elif kind is Kind.VALUE:
                self.values[name] = _random(meta, self.device)
        sum_in_float32(self.weights.values())

    @property
    def context(self) -> SegmentContext:
        """What the segment reads besides its inputs."""
        return SegmentContext(
            weights=self.weights,
            buffers=self.buffers,
            columns=self.columns,
            batch_only=self.batch_only,
            random_key=(0, "profile"),
            device=self.device,
        )


def _random(meta: TensorMeta, device: torch.device) -> torch.Tensor:
    """Small numbers; zeros of types that are no floating point."""
    if meta.dtype.is_floating_point:
        return (0.02 * torch.randn(meta.shape, device=device)).to(meta.dtype)
    return torch.zeros(meta.shape, dtype=meta.dtype, device=device)


def _seconds(inputs: _Inputs, watch: Stopwatch, draws: bool) -> PassSeconds:
    deferred = WeightGradients()
    ctx = replace(inputs.context, weight_gradients=deferred)

    def compiled(immediate: Sequence[str] | None) -> SegmentProgram:
        compiler = Compiler(inputs.graph, joins=True, immediate=immediate)
        program, _ = compiler.segment(inputs.segment, [])
        return replace(program, draws=draws, gradient_inputs=_carries(inputs.segment))

    def forward(run: SegmentProgram, save: bool) -> tuple[run_segment.Saved, TensorDict]:
        values = dict(inputs.values)
        return run_segment.forward(run, values, ctx, save), values

    program = compiled(None)
    carried = [n for n in inputs.segment.outputs if inputs.graph.values[n].requires_grad]
    plain = _Passes(program, lambda save: forward(program, save), carried, ctx, watch)
    forward_s = plain.forward_s()
    recompute_s = plain.recompute_s()
    if not program.trains:
        return PassSeconds(forward_s, recompute_s, 0.0, 0.0, 0.0)
    backward_s, _ = plain.backward_s()
    split = compiled([])
    split_passes = _Passes(split, lambda save: forward(split, save), carried, ctx, watch, deferred)
    input_s, weight_s = split_passes.backward_s()
    return PassSeconds(forward_s, recompute_s, backward_s, input_s, weight_s)


def _carries(segment: Segment) -> tuple[bool, ...]:
    """Per input of a segment, whether a gradient goes back through it."""
    metas = {
        node.meta["name"]: node.meta["tensor"]
        for node in segment.graph.find_nodes(op="placeholder")
        if node.meta["kind"] is Kind.VALUE
    }
    return tuple(metas[name].requires_grad for name in segment.inputs)


Forward = Callable[[bool], tuple[run_segment.Saved, TensorDict]]
"""Runs a forward that saves its activations, or does not."""


@dataclass(slots=True)
class _Passes:
    """Passes of one segment.

    Args:
        program: of the segment.
        forward: runs it.
        carried: names of the outputs through which a gradient comes back.
        ctx: what it reads.
        watch: measures.
        deferred: gradients of weights of a split backward; None for a whole one.
    """

    program: SegmentProgram
    forward: Forward
    carried: Sequence[str]
    ctx: SegmentContext
    watch: Stopwatch
    deferred: WeightGradients | None = None

    def forward_s(self) -> float:
        """Seconds of a forward that saves its activations."""
        return self.watch.after(lambda: None, lambda _: self.forward(True))

    def recompute_s(self) -> float:
        """Seconds of a recomputation."""
        if not self.program.trains:
            return 0.0
        return self.watch.after(
            lambda: self.forward(False)[0],
            lambda saved: run_segment.recompute(self.program, saved, self.ctx),
        )

    def backward_s(self) -> tuple[float, float]:
        """Seconds of a backward, and of the gradients of weights that it left."""

        def start() -> tuple[run_segment.Saved, TensorDict]:
            saved, values = self.forward(True)
            gradients = {name: torch.ones_like(values[name]) for name in self.carried}
            if self.deferred is not None:
                self.deferred.start(0, defers=True)
            return saved, gradients

        def backward(started: tuple[run_segment.Saved, TensorDict]) -> None:
            run_segment.backward(self.program, *started, self.ctx, lambda _: None)

        if self.deferred is None:
            return self.watch.after(start, backward), 0.0
        deferred = self.deferred

        def fresh() -> tuple[run_segment.Saved, TensorDict]:
            deferred.forget()
            return start()

        def deferring() -> WeightGradients:
            backward(fresh())
            return deferred

        return self.watch.after(fresh, backward), self.watch.after(
            deferring, lambda own: own.run(0, self.program.segment.index)
        )
