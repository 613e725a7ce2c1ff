"""The programs of a rank: the model's segments, compiled for every shape that it meets."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial

from merak.core.errors import ArgumentsError, TraceError
from merak.core.mesh import Mesh
from merak.core.precision import refuse_autocast_around
from merak.core.rank0 import warn_on_rank0
from merak.core.tensor_meta import Signature, known_masks
from merak.engine.comm.buffer_sync import find_synced_buffers, find_writers
from merak.engine.comm.eval_parameters import find_remote_parameters
from merak.engine.comm.sparse_gradients import densify, find_densified
from merak.engine.python_state import PythonState
from merak.graph.chunked_loss import (
    ChunkedLoss,
    RankRewrite,
    for_evaluation,
    with_chunked_loss,
    with_loss_alone,
)
from merak.graph.context_parallel.apply import (
    ContextParallel,
    context_parallel,
    gathered_operators,
)
from merak.graph.context_parallel.padded_rows import ignores_padding
from merak.graph.expert_parallel.apply import exact, with_experts
from merak.graph.float8 import with_float8
from merak.graph.ir.ir import ModelGraph, Segment, batch_size
from merak.graph.ir.replicas import meets_replicas
from merak.graph.ir.torch_compiler import TorchCompiler
from merak.graph.program.codegen import runnable
from merak.graph.program.index_ranges import find_index_ranges
from merak.graph.program.program import (
    RECOMPUTE_ALL,
    ActivationChoices,
    Arrange,
    Compiler,
    Program,
    RemoteParameter,
    Rewrite,
    arrange_whole,
    compile_program,
)
from merak.graph.program.sub_pipelined import arrange_sub_pipelined
from merak.graph.segment.build import GraphSource
from merak.graph.segment.dynamic_shapes import GraphsByShape
from merak.graph.sub_pipelining.sub_microbatch import find_sample_dims
from merak.graph.tensor_parallel.apply import TensorParallel, tensor_parallel
from merak.graph.tensor_parallel.features import Features
from merak.graph.tensor_parallel.report import replication_warning
from merak.plan.engine_options import EngineOptions
from merak.plan.layout import Layout, stage_bounds, stages_of_parameters

logger = logging.getLogger(__name__)

MASKED_AS_FAST = ("cpu",)
"""Types of devices on which attention takes a mask in its fastest kernel, and rounds as eager's."""


class ProgramCache:
    """The programs of this rank by signature; compiled when a shape is first met, then cached.

    All ranks of a pipeline meet the same shapes in the same order, so they keep the same ones.

    Args:
        source: the model.
        mesh: the grid of ranks.
        layout: which segments form which stage.
        parallel: what tensor and context parallelism do to segments; None for nothing.
        is_sub_pipelined: whether microbatches run as sub-microbatches, where they can.
        options: of the job: how many shapes are cached beside the planned one, and the observer.

    Attributes:
        num_made: programs made so far, beside the planned one.
        meets_replicas: whether a microbatch takes rows from those of other replicas.
    """

    def __init__(
        self,
        source: GraphSource,
        mesh: Mesh,
        layout: Layout,
        parallel: RankRewrite | None,
        is_sub_pipelined: bool,
        options: EngineOptions,
    ) -> None:
        self.source = source
        graph = layout.graph
        self.own_stages = layout.schedule.stages_of(mesh.pp_rank)
        self.owners = stages_of_parameters(graph, layout.partition)
        self.mesh = mesh
        self._partition = layout.partition
        self._writers = find_writers(layout) if options.trains else {}
        written = graph.constants.keys() & self._writers
        self.buffers = {name: graph.constants[name].to(mesh.device) for name in written}
        self._stage_rank = layout.stage_rank
        self._choices = _choices(layout)
        self._is_sub_pipelined = is_sub_pipelined
        self._parallel = parallel
        self._observer = options.observer
        how = options.compilation
        self._compiler = None if how is None else TorchCompiler(how)
        self._zero, self._trains = options.zero, options.trains
        self._splits_backwards = layout.schedule.splits_backwards
        self._shared = frozenset(n for n, stages in num_readers(graph).items() if stages > 1)
        self.densified = find_densified(layout, mesh)
        self._graph = graph
        self.meets_replicas = meets_replicas(graph)
        self._base_key = (tuple(graph.columns.items()), options.trains)
        self.base = self._compile(graph, options.trains)
        self._is_base_stale = False
        self._graphs: dict[tuple[object, ...], GraphsByShape] = {}
        self.state = PythonState(source)
        self.state.add(graph.reads)
        self._compiled = lru_cache(maxsize=options.max_shapes)(self._make)
        self.queried = graph.queried
        """Columns whose ones make another program."""
        self._tries_padded = mesh.device.type not in MASKED_AS_FAST
        self._parameters = {options.trains: _parameters(graph)}
        self._max_shapes = options.max_shapes
        self.num_made = 0
        self.prepared: set[tuple[bool, bool, Signature]] = set()
        """Whether ranks train, or want the loss alone, and shapes: all have made programs for."""
        self._seconds = 0.0
        if mesh.dp > 1 and _known(self.base_signature):
            self(known_masks(self.base_signature), options.trains)  # while all replicas do

    def _make_rewrites(self, parallel: RankRewrite | None) -> dict[int, list[Rewrite]]:
        rewrites: dict[int, list[Rewrite]] = {}
        for stage in self.own_stages:
            rewrites[stage] = [parallel] if parallel else []
            if self.densified:
                rewrites[stage].append(partial(densify, self.densified))
            if self._observer is not None:
                rewrites[stage].append(self._observer)
        return rewrites

    @property
    def has_places(self) -> bool:
        """Whether experts have, in training, a fixed number of places for rows of each replica."""
        parallel = for_evaluation(self._parallel)
        return exact(parallel) is not parallel

    @property
    def base_signature(self) -> Signature:
        """The columns of an ordinary microbatch."""
        return self._base_key[0]

    def own_segments(self) -> dict[int, list[Segment]]:
        """The segments of each of this rank's stages."""
        return {s: [p.segment for p in self.base.stages[s].segments] for s in self.own_stages}

    def _graph_of(self, signature: Signature, training: bool) -> ModelGraph:
        """The graph of a signature: resized from those of batches of which as much is known."""
        base, trains = self._base_key
        kind = (training, *_kind(signature))
        if kind not in self._graphs:
            first = None if self._is_base_stale or kind != (trains, *_kind(base)) else self._graph
            self._graphs[kind] = GraphsByShape(
                self.source,
                training=training,
                first=first,
                earlier=None if self._is_base_stale else self._graph.columns,
            )
        return self._graphs[kind](dict(signature))

    def __call__(self, signature: Signature, training: bool, only_loss: bool = False) -> Program:
        """The program of a signature, in training or evaluation.

        Its columns are those of the signature, and the numbers of `state`. A column that is ones
        makes another program where the model asks whether it is; so does one that ends samples in
        training, where nothing reads what is behind their ends. An evaluation whose loss alone is
        wanted makes no logits where its head has chunks.
        """
        padded = self.queried if training and self._tries_padded else ()
        signature = known_masks(signature, self.queried, padded)
        is_base = (signature, training) == self._base_key and not self._is_base_stale
        if is_base and not only_loss:
            return self.base
        return self._compiled((*signature, *self.state.signature), training, only_loss)

    def refresh(self) -> bool:
        """Trace the model anew where Python state that it reads has changed.

        Returns:
            Whether it has.

        Raises:
            TraceError: it cannot be.
            TrainingError: a parameter is to be trained that was frozen.
            ArgumentsError: another autocast than the job's is around this call.
        """
        refuse_autocast_around(self.source.autocast, self.mesh.device)
        self.state.frozen()
        changes = self.state.changes()
        if changes:
            self.state.adopt(changes, self._trace_anew)
        return bool(changes)

    def _trace_anew(self) -> None:
        self._is_base_stale = True
        self._graphs.clear()
        self._compiled.cache_clear()
        self(*self._base_key)

    def _make(self, signature: Signature, training: bool, only_loss: bool) -> Program:
        started = time.perf_counter()
        graph = self._graph_of(signature, training)
        self.state.add(graph.reads)
        own = _parameters(graph)
        if self.queried and self._parameters.setdefault(training, own) != own:
            # Replicas may know different things of their batches, and reduce gradients together.
            self.queried = frozenset()
            if _known(signature):
                return self(known_masks(signature), training, only_loss)
        ended = [name for name, meta in signature if meta.ignored]
        if not all(ignores_padding(graph, name) for name in ended):
            self._tries_padded = False
            return self(signature, training, only_loss)
        if only_loss:
            alone = with_loss_alone(graph, self._parallel)
            if alone is None:
                return self(signature, training)
            graph = alone
        program = self._compile(graph, training, only_loss)
        self.num_made += 1
        self._seconds += time.perf_counter() - started
        if self.num_made == 2 * self._max_shapes:
            self._warn()
        return program

    def _warn(self) -> None:
        warn_on_rank0(
            logger,
            "Batches of %d shapes have been prepared for, which took %.0f s, and max_shapes=%d are "
            "cached; pad to few lengths (pad_to_multiple_of of the data collator), batch samples "
            "of like length (train_sampling_strategy='group_by_length'), or raise max_shapes.",
            self.num_made,
            self._seconds,
            self._max_shapes,
        )

    def columns(self, signature: Signature, training: bool) -> tuple[str, ...]:
        """Columns that this rank reads of batches of a shape, whatever is known of them."""
        kinds = (signature, known_masks(signature))
        found = dict.fromkeys(c for kind in kinds for c in self(kind, training).columns)
        if found:  # what a rank knows of labels may depend on it
            found |= dict.fromkeys(name for name, _ in signature if name in self.queried)
        numbers = self.state.columns()
        return tuple(name for name in found if name not in numbers)

    def set_activation_choices(self, layout: Layout) -> None:
        """Recompile for a layout whose segments save other activations."""
        self._choices = _choices(layout)
        self.base = self._compile(self._graph, self._base_key[1])
        self._compiled.cache_clear()

    def _compile(self, graph: ModelGraph, training: bool, only_loss: bool = False) -> Program:
        bounds = stage_bounds(graph, self.owners, self._partition)
        remote_parameters = self._remote_parameters(graph, bounds, training)
        # A graph that was cut otherwise has other segments: their numbers mean nothing there.
        is_same = len(graph.segments) == self._partition.num_segments
        choices = self._choices if is_same and training else RECOMPUTE_ALL
        samples = None
        if self._is_sub_pipelined and graph.loss is not None:
            samples = find_sample_dims(graph.segments, batch_size(graph))
        whole = exact(for_evaluation(self._parallel))
        parallel = self._parallel if training else whole
        if only_loss and isinstance(self._parallel, ChunkedLoss):
            parallel = replace(self._parallel, within=whole)
        ranges = find_index_ranges(graph)
        if parallel is not None:
            graph, parallel = parallel.fit(graph)
        make = partial(runnable, compiler=self._compiler)
        joins = (training or samples is not None) and self._trains
        immediate = self._shared if self._splits_backwards else None
        compiler = Compiler(graph, make, joins, self._compiler, immediate)
        arrange: Arrange = arrange_whole
        if samples is not None:
            arrange = partial(arrange_sub_pipelined, samples, compiler)
        rewrites = self._make_rewrites(parallel)
        program = compile_program(graph, bounds, rewrites, choices, arrange, compiler)
        device = self.mesh.device
        synced_buffers = (
            find_synced_buffers(self._writers, self._stage_rank, graph, bounds)
            if not training
            else {}
        )
        held = graph.constants.items()
        constants = {n: t.to(device) for n, t in held if n not in self.buffers}
        return replace(
            program,
            constants=constants,
            synced_buffers=synced_buffers,
            remote_parameters=remote_parameters,
            ranges=ranges,
        )

    def _remote_parameters(
        self, graph: ModelGraph, bounds: Sequence[int], training: bool
    ) -> tuple[RemoteParameter, ...]:
        """The parameters that pp ranks fetch from each other, in evaluations.

        Raises:
            TraceError: a training step would need them too, or FSDP shards them.
        """
        remote_parameters = find_remote_parameters(self.owners, self._stage_rank, graph, bounds)
        if remote_parameters and (training or self._zero == 3):
            raise TraceError(
                f"{remote_parameters[0].name} is read on another stage in this mode or shape of "
                "the model than in the one that the job was planned with; use a smaller pp, or "
                + ("one batch shape." if training else "zero=2.")
            )
        return remote_parameters


def _parameters(graph: ModelGraph) -> list[tuple[str, ...]]:
    return [segment.parameters for segment in graph.segments]


def _known(signature: Signature) -> frozenset[object]:
    """What is known of columns beside their shapes."""
    known = ((name, meta.ones, meta.ignored, meta.documents) for name, meta in signature)
    return frozenset(one for one in known if any(one[1:]))


def _kind(signature: Signature) -> tuple[object, ...]:
    """What batches have in common that differ by shapes alone, without the numbers of `state`."""
    return _known(signature), frozenset(name for name, _ in signature)


def _choices(layout: Layout) -> ActivationChoices:
    policy = layout.activations
    selective = {index: ops.names for index, ops in policy.selective.items()}
    return ActivationChoices(policy.saved, selective, policy.offloaded)


def check_max_shapes(max_shapes: int) -> None:
    """Refuse a number of cached shapes below 1.

    Raises:
        ArgumentsError: it is below 1.
    """
    if max_shapes < 1:
        raise ArgumentsError(
            f"max_shapes={max_shapes} is no number of shapes to keep; use 1 or more."
        )


def local_rewrite(
    graph: ModelGraph,
    features: Features | None,
    mesh: Mesh,
    *,
    sequence: bool = False,
    capacity: float | None = None,
    fp8: bool = False,
    loss_chunk_bytes: int = 0,
    one_pass: bool = True,
) -> RankRewrite | None:
    """The rewrite of segments to those of one rank; every rank checks the whole model.

    Args:
        graph: the traced model.
        features: how weights are split that the graph does not decide.
        mesh: the degrees.
        sequence: whether tensor parallel ranks share the sequence.
        capacity: the option `expert_capacity`.
        fp8: the option.
        loss_chunk_bytes: the option.
        one_pass: as of `with_chunked_loss`.

    Raises:
        ShardError: the degrees do not fit the model.
    """
    tensor = _tensor_parallel_rewrite(graph, features, mesh, sequence)
    context = _context_parallel_rewrite(graph, tensor, mesh.cp)
    experts = with_experts(graph, tensor, context, mesh.ep, capacity)
    layers = with_float8(experts, fp8, mesh.tp, mesh.cp)
    return with_chunked_loss(layers, loss_chunk_bytes, one_pass)


def _context_parallel_rewrite(
    graph: ModelGraph, tensor: TensorParallel | None, cp: int
) -> ContextParallel | None:
    if cp == 1:
        return None
    parallel = context_parallel(graph, tensor, cp)
    found = gathered_operators(graph, parallel)
    if found is not None:
        warn_on_rank0(logger, "%s", found)
    return parallel


def _tensor_parallel_rewrite(
    graph: ModelGraph, features: Features | None, mesh: Mesh, sequence: bool
) -> TensorParallel | None:
    if mesh.tp == 1:
        return None
    parallel = tensor_parallel(graph, features, mesh.tp, sequence=sequence, ep=mesh.ep)
    warning = replication_warning(graph, parallel)
    if warning is not None:
        warn_on_rank0(logger, "%s", warning)
    return parallel


def num_readers(graph: ModelGraph) -> Counter[str]:
    """The number of segments that read each parameter."""
    return Counter(name for segment in graph.segments for name in segment.parameters)
