"""Program of a rank for one microbatch shape: its stages' segments as functions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from merak.core.shards import ParameterShard
from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import Kind, ModelGraph, ParameterWrites, Segment
from merak.graph.ir.mutation import depending_on
from merak.graph.ir.torch_compiler import TorchCompiler
from merak.graph.joint.segment import JointSegment, has_joint_graph, joint_segment
from merak.graph.program.codegen import Function, as_run, runnable
from merak.graph.program.index_ranges import IndexRange
from merak.graph.segment.buffer_kinds import written_buffers
from merak.graph.segment.cut import slice_outputs
from merak.graph.sub_pipelining.sub_microbatch import SubMicrobatch
from merak.graph.trace.branches.rng_stream import is_stream_draw
from merak.graph.trace.normalize import is_random

MakeFunction = Callable[[fx.Graph], Function]
"""Gives the function that runs a graph."""

Rewrite = Callable[[Segment], tuple[Segment, dict[str, ParameterShard]]]
"""Changes how a segment is run: its new form, and how it splits its parameters over tp."""


@dataclass(frozen=True, slots=True)
class SegmentProgram:
    """Function of a segment: (parameters, buffers, columns, inputs, batch_only) → outputs.

    Args:
        segment: what it computes, this rank's shard of it.
        function: returns the tuple of the segment's outputs.
        gradient_inputs: per input, whether a gradient goes back through it.
        trains: whether it has a backward: a gradient goes back through one of its outputs.
        draws: whether it draws random numbers.
        written: names of the buffers it writes into.
        repeated: names of the parameters that several of its operators read.
        saved: whether its activations are saved where its stage recomputes others.
        offload: where its activations are offloaded to host memory, the values that it reads or
            makes and that stay on the device for other segments; else None.
        joint: its forward and backward as a graph; None where autograd runs the backward.
        keeps: names of the operators whose results it saves where others are recomputed.
    """

    segment: Segment
    function: Callable[..., tuple[torch.Tensor, ...]]
    gradient_inputs: tuple[bool, ...]
    trains: bool
    draws: bool
    written: tuple[str, ...]
    repeated: tuple[str, ...] = ()
    saved: bool = False
    offload: frozenset[str] | None = None
    joint: JointSegment | None = None
    keeps: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ActivationChoices:
    """Activation policy of each segment in training, by segment index.

    Args:
        saved: segments that save their activations where their stage recomputes others.
        selective: by segment that recomputes, the operators whose results it saves.
        offloaded: of the saved segments, those that offload their activations to host memory.
    """

    saved: Container[int] = ()
    selective: Mapping[int, frozenset[str]] = field(default_factory=dict)
    offloaded: Container[int] = ()


@dataclass(frozen=True, slots=True)
class SubPipelinedSegment:
    """Segment that runs in sub-microbatches.

    Args:
        whole: the segment for all of a microbatch.
        programs: the same for the first sub-microbatch's samples, and for the second's.
        sub_microbatches: which samples they are.
        dims: the dim along which a sub-microbatch has its samples, by the name of an input, column,
            batch-only
            value or output; what is not named is the same for both.
    """

    whole: SegmentProgram
    programs: tuple[SegmentProgram, SegmentProgram]
    sub_microbatches: tuple[SubMicrobatch, SubMicrobatch]
    dims: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class SubPipelinedRun:
    """Consecutive segments that run in sub-microbatches.

    Args:
        segments: in execution order.
        inputs: what they read of others, and along which dim a sub-microbatch has its samples of
            it.
        outputs: what others read of them, likewise; None where both sub-microbatches make the same.
    """

    segments: tuple[SubPipelinedSegment, ...]
    inputs: Mapping[str, int | None]
    outputs: Mapping[str, int | None]

    @property
    def sub_microbatches(self) -> tuple[SubMicrobatch, SubMicrobatch]:
        """Samples of each sub-microbatch."""
        return self.segments[0].sub_microbatches


StageItem = SegmentProgram | SubPipelinedRun
"""One thing after another on a stage: a segment, or several in sub-microbatches."""

Arrange = Callable[
    [Sequence[Segment], Sequence[SegmentProgram], Sequence[Rewrite], frozenset[str]],
    tuple[StageItem, ...],
]
"""Gives the order of work of a stage; see `graph.program.sub_pipelined.arrange_sub_pipelined`."""


def arrange_whole(
    segments: Sequence[Segment],
    programs: Sequence[SegmentProgram],
    rewrites: Sequence[Rewrite],
    leaving: frozenset[str],
) -> tuple[StageItem, ...]:
    """Stage items that run one segment after the other, each for the full microbatch."""
    return tuple(programs)


@dataclass(frozen=True, slots=True)
class StageProgram:
    """Functions of a stage's segments, and the values that enter and leave the stage.

    Args:
        segments: in execution order.
        runs: the same in the order and the way they are run.
        received: values that come from the stage before, in the order they are sent.
        sent: values that go to the stage after.
        results: outputs of the model made here → value names.
    """

    segments: tuple[SegmentProgram, ...]
    runs: tuple[StageItem, ...]
    received: tuple[str, ...]
    sent: tuple[str, ...]
    results: dict[str, str]


@dataclass(frozen=True, slots=True)
class RemoteParameter:
    """Parameter that one pp rank sends to another for an evaluation.

    Args:
        name: of the parameter.
        owner: pp rank of a rank that holds it.
        reader: pp rank of one that does not, and reads it.
        meta: what the whole parameter is.
    """

    name: str
    owner: int
    reader: int
    meta: TensorMeta


class FixedValues:
    """Cached values of a program that no column of the batch changes."""

    def __init__(self) -> None:
        self._values: dict[str, torch.Tensor] = {}
        self._versions: Sequence[int] | None = None

    def at(
        self, versions: Sequence[int], compute: Callable[[], dict[str, torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        """The values, computed again where a buffer that they depend on has been written.

        Args:
            versions: of these buffers, as torch counts the writes into a tensor.
            compute: makes the values.
        """
        if self._versions != versions:
            self._values, self._versions = compute(), versions
        return self._values


@dataclass(frozen=True, slots=True)
class Program:
    """Functions and values of one rank for microbatches of one shape.

    Args:
        stages: this rank's stages, by stage number.
        fixed: computes batch-only values that depend on no column, once for all microbatches.
        batch_only: computes this rank's other batch-only values from the columns of a microbatch.
        columns: the columns this rank reads.
        values: what each value is.
        outputs: names of the model's outputs, in its order, on whatever rank they are made.
        output_values: the name of each of these outputs' value.
        loss: the name of the loss value; None in evaluation without labels.
        shards: how the parameters of this rank's stages are split over tp.
        constants: tensors of the trace's own, by name; another shape's may have the same names.
        fixed_values: what `fixed` has computed.
        parameter_writes: what is written into parameters before the stages run.
        synced_buffers: of evaluation, buffers that training writes elsewhere; see
            `merak.engine.comm.buffer_sync`.
        remote_parameters: of evaluation, parameters that other ranks hold; see
            `merak.engine.comm.eval_parameters`.
        ranges: what its columns hold indices of.
        replay: as of `ModelGraph`.
    """

    stages: dict[int, StageProgram]
    fixed: SegmentProgram
    batch_only: SegmentProgram
    columns: tuple[str, ...]
    values: dict[str, TensorMeta]
    outputs: tuple[str, ...]
    output_values: tuple[str, ...]
    loss: str | None
    shards: dict[str, ParameterShard]
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    fixed_values: FixedValues = field(default_factory=FixedValues)
    parameter_writes: tuple[ParameterWrites, ...] = ()
    synced_buffers: dict[str, int] = field(default_factory=dict)
    remote_parameters: tuple[RemoteParameter, ...] = ()
    ranges: tuple[IndexRange, ...] = ()
    replay: Callable[..., None] | None = None

    @property
    def has_random_branches(self) -> bool:
        """Whether random numbers decide which of this rank's operators run."""
        return any(is_stream_draw(node) for node in self.batch_only.segment.graph.nodes)

    def gradients_of(self, names: Sequence[str]) -> tuple[str, ...]:
        """Names of those values that carry a gradient."""
        return tuple(name for name in names if self.values[name].requires_grad)


RECOMPUTE_ALL = ActivationChoices()


def compile_program(
    graph: ModelGraph,
    bounds: Sequence[int],
    rewrites: Mapping[int, Sequence[Rewrite]],
    choices: ActivationChoices = RECOMPUTE_ALL,
    arrange: Arrange = arrange_whole,
    compiler: Compiler | None = None,
) -> Program:
    """Program of a rank: its segments turned into functions.

    Args:
        graph: the whole model, cut into segments.
        bounds: stage s holds the segments bounds[s] … bounds[s + 1] − 1.
        rewrites: the stages this rank holds, and what is done in turn to the segments of each.
        choices: what segments do with their activations.
        arrange: gives the order of work of a stage.
        compiler: of the graph's segments; None for one of its own.
    """
    compiler = Compiler(graph) if compiler is None else compiler
    crossing = ((), *graph.boundaries(), ())
    shards: dict[str, ParameterShard] = {}
    stages: dict[int, StageProgram] = {}
    batch_only: set[str] = set()
    for stage, own_rewrites in rewrites.items():
        first, stop = bounds[stage], bounds[stage + 1]
        programs = []
        for segment in graph.segments[first:stop]:
            is_saved = segment.index in choices.saved
            keeps = frozenset() if is_saved else choices.selective.get(segment.index, frozenset())
            program, split = compiler.segment(segment, own_rewrites, keeps)
            shards |= split
            batch_only.update(program.segment.batch_only)
            programs.append(replace(program, saved=is_saved))
        programs = with_offloading(programs, choices.offloaded)
        made = {name for p in programs for name in p.segment.outputs}
        results = {name: value for name, value in graph.outputs.items() if value in made}
        leaving = frozenset((*crossing[stop], *results.values()))
        runs = arrange(graph.segments[first:stop], programs, own_rewrites, leaving)
        stages[stage] = StageProgram(
            tuple(programs), runs, crossing[first], crossing[stop], results
        )
    fixed, varying = compiler.prologues(frozenset(batch_only))
    return Program(
        stages=stages,
        fixed=fixed,
        batch_only=varying,
        columns=_columns(stages, varying, graph),
        values=graph.values,
        outputs=tuple(graph.outputs),
        output_values=tuple(graph.outputs.values()),
        loss=graph.loss,
        shards=shards,
        parameter_writes=graph.parameter_writes,
        replay=graph.replay,
    )


@dataclass(eq=False)
class Compiler:
    """Compiles the segments of a graph into functions.

    Args:
        graph: the whole model, cut into segments.
        make: gives the function of a segment's graph.
        joins: whether forwards and backwards of segments are made as one graph, where they can be.
        torch_compiler: compiles those graphs; None runs their operators as they are.
        immediate: where backwards are split, names of the parameters whose gradients are not left
            for later; None where they are whole.
    """

    graph: ModelGraph
    make: MakeFunction = runnable
    joins: bool = False
    torch_compiler: TorchCompiler | None = None
    immediate: Collection[str] | None = None

    def segment(
        self,
        segment: Segment,
        rewrites: Sequence[Rewrite],
        keeps: frozenset[str] = frozenset(),
        yields: bool = False,
    ) -> tuple[SegmentProgram, dict[str, ParameterShard]]:
        """Program of a segment, and how its parameters are split over tp.

        Args:
            segment: of the graph.
            rewrites: what is done to it in turn.
            keeps: names of its operators whose results are saved where it recomputes.
            yields: whether something else may run while an all-reduce of it does.
        """
        draws = has_draws(segment)  # which its rewritten form, of operators of our own, may hide
        local, shards = _rewritten(segment, rewrites)
        joint = self._joint(local, keeps, yields)
        program = compile_segment(local, self.graph.values, draws, self.make)
        return replace(program, joint=joint, keeps=keeps), shards

    def extended(self, values: Mapping[str, TensorMeta]) -> Compiler:
        """The same for segments that give one another further values."""
        graph = replace(self.graph, values={**self.graph.values, **values})
        return replace(self, graph=graph)

    def _joint(self, segment: Segment, keeps: Container[str], yields: bool) -> JointSegment | None:
        if not self.joins or not (yields or _trains(segment, self.graph.values)):
            return None
        now = segment.parameters if self.immediate is None else self.immediate
        late = frozenset(segment.parameters).difference(now)
        graph = as_run(segment.graph)
        return joint_segment(segment.graph, graph, late, keeps, yields, self.torch_compiler)

    def prologues(self, names: frozenset[str]) -> tuple[SegmentProgram, SegmentProgram]:
        """Prologues of a rank: first the batch-only values that no column or draw changes.

        Args:
            names: batch-only values that the rank reads.
        """
        prologue, values = self.graph.prologue, self.graph.values
        varying = _depends_on_columns(prologue.graph)
        wanted = [name for name in prologue.outputs if name in names]
        fixed = slice_outputs(prologue, [n for n in wanted if n not in varying])
        rest = slice_outputs(prologue, [n for n in wanted if n in varying])
        return compile_segment(fixed, values), compile_segment(rest, values)


def _rewritten(
    segment: Segment, rewrites: Sequence[Rewrite]
) -> tuple[Segment, dict[str, ParameterShard]]:
    """A segment to which rewrites are done in turn, and how its parameters are split over tp."""
    shards: dict[str, ParameterShard] = {}
    for rewrite in rewrites:
        segment, split = rewrite(segment)
        shards |= split
    return segment, shards


def _trains(segment: Segment, values: Mapping[str, TensorMeta]) -> bool:
    return any(values[name].requires_grad for name in segment.outputs)


def compile_segment(
    segment: Segment,
    values: Mapping[str, TensorMeta],
    draws: bool = False,
    make: MakeFunction = runnable,
) -> SegmentProgram:
    """Program of a segment: a Python function that runs its operators one after another."""
    return SegmentProgram(
        segment=segment,
        function=make(segment.graph),
        gradient_inputs=tuple(values[name].requires_grad for name in segment.inputs),
        trains=_trains(segment, values),
        draws=draws,
        written=written_buffers(segment.graph),
        repeated=tuple(
            node.meta["name"]
            for node in segment.graph.find_nodes(op="placeholder")
            if node.meta["kind"] is Kind.PARAMETER and len(node.users) > 1
        ),
    )


def with_offloading(
    programs: Sequence[SegmentProgram], offloaded: Container[int]
) -> list[SegmentProgram]:
    """Programs of a stage of which some offload their activations to host memory.

    What autograd saves stays on the device.

    Args:
        programs: of the stage, in order, with what saves its activations.
        offloaded: numbers of segments.
    """
    away = [
        p.trains and p.saved and p.segment.index in offloaded and has_joint_graph(p.segment.graph)
        for p in programs
    ]
    held: set[str] = set()
    for program, goes in zip(programs, away, strict=True):
        if program.trains and not goes:
            # What recomputes holds its inputs alone.
            held.update(program.segment.inputs, program.segment.outputs if program.saved else ())
    return [
        replace(p, offload=frozenset(held & {*p.segment.inputs, *p.segment.outputs})) if goes else p
        for p, goes in zip(programs, away, strict=True)
    ]


def has_draws(segment: Segment) -> bool:
    """Whether a segment as traced draws random numbers."""
    return any(is_random(n) for n in segment.graph.nodes if n.op == "call_function")


def _depends_on_columns(graph: fx.Graph) -> set[str]:
    columns = [n for n in graph.find_nodes(op="placeholder") if n.meta["kind"] is Kind.COLUMN]
    draws = [node for node in graph.nodes if is_stream_draw(node)]
    return {node.name for node in depending_on(graph, [*columns, *draws])}


def _columns(
    stages: Mapping[int, StageProgram], batch_only: SegmentProgram, graph: ModelGraph
) -> tuple[str, ...]:
    read = set(batch_only.segment.columns)
    parameters: set[str] = set()
    for stage in stages.values():
        for program in stage.segments:
            read.update(program.segment.columns)
            parameters.update(program.segment.parameters)
    for one in graph.parameter_writes:
        read.update(one.columns if one.parameter in parameters else ())
    return tuple(name for name in graph.columns if name in read)
