"""Traces of models without weights: one graph of ATen operators, with the loss inside.

`torch.export` runs the model once on fake tensors, so nothing is allocated and nothing computed;
what comes out is the operators that one device would run, in their order.
"""

from __future__ import annotations

import contextvars
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from merak.core.errors import TraceError
from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.replicas import mark_own
from merak.graph.ir.state_read import LOSS
from merak.graph.trace.branches.conditions import RandomConditions
from merak.graph.trace.branches.host_random import (
    HostRandomError,
    HostRandomFunctions,
    seed_host_random,
)
from merak.graph.trace.calls.call import Call, InputReshaped, LossFunction
from merak.graph.trace.calls.eager_loss import LossTail, is_eager
from merak.graph.trace.calls.exported import Exported, lift
from merak.graph.trace.calls.further_calls import (
    check_further_calls,
    described_call,
    refuse_left,
    warn_of_left,
)
from merak.graph.trace.calls.loss_recorder import ReadDecides, rehearse
from merak.graph.trace.calls.model_loss import ModelLoss
from merak.graph.trace.calls.outer_reads import refuse_outer_reads
from merak.graph.trace.calls.replay import Replay
from merak.graph.trace.calls.runner import Runner, columns_of_calls, refuse_growing
from merak.graph.trace.explain import explain
from merak.graph.trace.fallbacks import trace_with_fallbacks
from merak.graph.trace.modes.constant_values import BatchValues
from merak.graph.trace.modes.fakes import fake_batch, hidden_compilation
from merak.graph.trace.modes.grad_hooks import select_hooked_modules
from merak.graph.trace.modes.known_ones import KnownOnes
from merak.graph.trace.modes.lean_export import lean_export
from merak.graph.trace.modes.quiet_export import quiet_export
from merak.graph.trace.normalize import Rewriting
from merak.graph.trace.opaque.dynamic_region import DynamicSizes
from merak.graph.trace.opaque.loops import Loops
from merak.graph.trace.opaque.operator import LOSS_TAIL, MODEL_LOSS, attach_calls
from merak.graph.trace.opaque.record import RealTensors
from merak.graph.trace.opaque.selection import OpaqueSelection
from merak.graph.trace.passes import run_passes
from merak.graph.trace.repeats.calls import LeftOpen
from merak.graph.trace.session import MODES, REPLACEMENTS, Session, entered
from merak.graph.trace.state.left import LeftState
from merak.graph.trace.state.places import StateLeft
from merak.graph.trace.state.rank_reads import RankReads, refuse_by_rank
from merak.graph.trace.state.record import StateReads
from merak.graph.trace.state.slots import Slot
from merak.graph.trace.traced import Trace

logger = logging.getLogger(__name__)


def trace(
    model: nn.Module,
    columns: Mapping[str, TensorMeta],
    *,
    loss_fn: LossFunction | None = None,
    loss_columns: tuple[str, ...] = (),
    fixed: Mapping[str, Any] | None = None,
    device: torch.device | None = None,
    autocast: torch.dtype | None = None,
    opaque: OpaqueSelection | None = None,
    numbers: Mapping[str, Slot] | None = None,
    copies_blocks: bool = False,
    example: Mapping[str, torch.Tensor] | None = None,
) -> Trace:
    """Trace a model: run it once on fake tensors and record its operators.

    Args:
        model: any module, in the mode (train or eval) to trace; its parameters may be on meta.
        columns: the batch's tensors by the name of the model's argument, at microbatch shape.
        loss_fn: `loss_fn(outputs, batch) -> loss`, where the model does not compute a loss itself.
        loss_columns: columns that go to the loss function alone.
        fixed: further keyword arguments that are no tensors, passed as they are.
        device: device type the model will run on; fake tensors claim to be there.
        autocast: the model's forward runs under torch.autocast with this type, its outputs become
            float32, and the loss function is outside, as transformers.Trainer has it.
        opaque: modules that are opaque from the first; gains those that have to be.
        numbers: places of Python numbers that are inputs of the graph, by their column.
        copies_blocks: record calls of blocks that equal earlier ones as copies of those, which is
            as good for planning; see `merak.graph.trace.repeats`.
        example: values of such a batch, to measure opaque modules on; None for made-up ones.

    Returns:
        The trace.

    Raises:
        TraceError: the model's code cannot be traced, naming the line of it that cannot.
    """
    device = torch.device((device or torch.device("cpu")).type)
    casts = None if autocast is None else partial(torch.autocast, device.type, autocast)
    call = Call(
        tuple(columns), dict(fixed or {}), loss_fn, loss_columns, casts, numbers=dict(numbers or {})
    )
    opaque = OpaqueSelection() if opaque is None else opaque
    opaque.forget_loops()
    decides: ReadDecides | None = None
    while True:
        try:
            made = _traced(model, columns, call, device, opaque, copies_blocks, example or {})
            if decides is not None and any(one.is_lost for one in made.left):
                raise decides  # which keeps what it reads as well
            return made
        except TraceError as error:
            other = _other_call(call, error)
            if other is not None:
                call, decides = other, error if isinstance(error, ReadDecides) else decides
                continue
            if type(error) is TraceError and decides is None:
                raise
            # Subclasses steer the fallbacks alone: users catch, and read, one class.
            raise TraceError(str(decides or error)) from error.__cause__


def _other_call(call: Call, error: TraceError) -> Call | None:
    """The call to trace in place of one that has failed; None for none."""
    function = error.function if isinstance(error, HostRandomError) else None
    if function is not None and function not in call.host_random:
        return replace(call, host_random=(*call.host_random, function))
    if isinstance(error, InputReshaped) and not call.reshapes:
        return replace(call, reshapes=True)
    if isinstance(error, ReadDecides) and call.reads_on_host:
        # A loss may compute with the number as a symbol, or choose by the batch.
        return replace(call, reads_on_host=False)
    return None


def _traced(
    model: nn.Module,
    columns: Mapping[str, TensorMeta],
    call: Call,
    device: torch.device,
    opaque: OpaqueSelection,
    copies_blocks: bool,
    example: Mapping[str, torch.Tensor],
) -> Trace:
    """Trace a model, with all branches of its conditions."""
    _refuse_trained_loss(call.loss_fn)
    ranks = RankReads(training=model.training)
    run = partial(export_model, model, columns, call, device, example=example, ranks=ranks)

    def export(answers: tuple[bool, ...], opaque: OpaqueSelection) -> Trace:
        select_hooked_modules(model, opaque)
        whole = partial(run, answers=answers, opaque=opaque)
        if not copies_blocks or answers or opaque.modules or opaque.functions or opaque.by_batch:
            return normalized(whole(), columns)
        try:
            return normalized(whole(copies_blocks=True), columns)
        except (LeftOpen, TraceError) as error:  # the whole trace shows whether the copies did it
            logger.debug("no copies of blocks: %s", error)
            return normalized(whole(), columns)

    made = trace_with_fallbacks(model, export, opaque)
    made = replace(made, is_of_replica=ranks.asks_size or ranks.are_met)
    refuse_left(made.left)
    if isinstance(made.replay, Replay):
        batch = {name: meta for name, meta in columns.items() if name not in call.numbers}
        rehearse(made.replay, model, batch, device)
    calls = partial(run, opaque=opaque)
    if ranks.lines:
        mark_own(made.graph)

    def described(ranks: RankReads) -> object:
        return described_call(calls(ranks=ranks))

    is_warned_of = refuse_by_rank(ranks, described)
    refuse_outer_reads(model, call.loss_fn, ranks, described)
    seed_host_random(made.graph)
    if not any(one.may_be_read for one in made.left):
        return replace(made, is_warned_of=warn_of_left(made.left) or is_warned_of)
    return replace(made, is_warned_of=check_further_calls(made.left, calls) or is_warned_of)


def export_model(
    model: nn.Module,
    columns: Mapping[str, TensorMeta],
    call: Call,
    device: torch.device,
    *,
    symbolic: bool = False,
    answers: tuple[bool, ...] = (),
    opaque: OpaqueSelection | None = None,
    copies_blocks: bool = False,
    num_calls: int = 1,
    counts: Sequence[Mapping[str, float]] = (),
    batches: Sequence[Mapping[str, TensorMeta]] = (),
    example: Mapping[str, torch.Tensor] | None = None,
    ranks: RankReads | None = None,
) -> Exported:
    """Run `torch.export` on a model: the first half of `trace`.

    Args:
        model: as of `trace`.
        columns: as of `trace`.
        call: how the model is called.
        device: device that fake tensors claim to be on.
        symbolic: keep sizes that depend on the batch's as symbols, not as numbers.
        answers: to the model's random conditions; further ones are False.
        opaque: opaque modules and functions.
        copies_blocks: as of `trace`.
        num_calls: how often the model is called, each time with such a batch.
        counts: per call, values that counters are set to before it, by their label.
        batches: the columns of each call, where these differ; none for `num_calls` like ones.
        example: as of `trace`.
        ranks: records reads of the rank; None where nobody asks for them.

    Raises:
        LeftOpen: calls were copied that must not be.
        TraceError: as of `trace`.
    """
    opaque = OpaqueSelection() if opaque is None else opaque
    conditions = RandomConditions(answers, opaque.by_batch)
    real = RealTensors.of(model)
    reads = StateReads(model, call.loss_fn)
    columns = columns_of_calls(batches := batches or [columns] * num_calls)
    tail, losses = _opaque_losses(model, columns, call, reads)
    session = Session(
        model, columns, device, opaque, conditions, HostRandomFunctions(call.host_random), real,
        reads, Loops(model, opaque.unrolled), ranks or RankReads(training=model.training),
        copies_blocks, example=BatchValues(example or {}), ones=KnownOnes(batches[0]),
        losses=losses)  # fmt: skip
    own = {tensor.untyped_storage()._cdata for tensor in real.tensors.values()}

    def goes_on(left: StateLeft) -> bool:  # unless it is a view of a parameter
        return left.old.untyped_storage()._cdata not in own and reads.goes_on(left)

    runner = Runner(model, call, conditions, goes_on, len(batches), counts, session.begin, tail)
    program = contextvars.copy_context().run(_run_export, session, runner, call, symbolic)
    if len(batches) == 1:
        refuse_growing(program, runner.run.remade)
    session.autograd.refuse_left_frozen()
    session.checks.warn_skipped(are_sizes_checked=opaque.sizes is not DynamicSizes.REFUSED)
    return _exported(program, session, runner)


def _opaque_losses(
    model: nn.Module, columns: Mapping[str, TensorMeta], call: Call, reads: StateReads
) -> tuple[LossTail | None, dict[str, LossTail | ModelLoss]]:
    """The tail of a loss, None for none; and what of losses is opaque, by its path."""
    tail = LossTail(model, call, reads.paused) if is_eager(call.loss_fn) else None
    of_model = ModelLoss.of(model, columns, reads.paused)
    found = {LOSS_TAIL: tail, MODEL_LOSS: of_model}
    return tail, {path: one for path, one in found.items() if one is not None}


def _exported(program: torch.export.ExportedProgram, session: Session, runner: Runner) -> Exported:
    """An exported program, and what its session and its calls have found out."""
    attach_calls(program.graph_module, session.calls)
    names, tied = parameter_names(session.model)
    reads, opaque, run = session.reads, session.opaque, runner.run
    # What Merak's own code sets, such as the trainer's around a loss, is no state of the model.
    left = [[one for one in found if not reads.is_mine(one)] for found in run.left]
    has_effects = bool(run.to_tail) or any(
        one.has_effects or one.has_reads for one in run.recorders
    )
    is_left = any(one.place.root == LOSS for found in left for one in found)
    replay = runner.run.replay(runner.call) if has_effects or is_left else None
    return Exported(
        program.graph_module.graph,
        program.graph_signature,
        program.constants,
        run.outputs,
        names,
        tied,
        runner.columns,
        len(session.conditions.made),
        opaque.sizes,
        reads.found(left[0], run.written, opaque.modules),
        tuple(tuple(LeftState.of(one, reads, replay is not None) for one in call) for call in left),
        {label: counter.values() for label, counter in run.counters.items()},
        tuple(sorted(run.remade)),
        frozenset(session.ones.queried),
        run.tensors,
        dict(session.model.named_buffers(remove_duplicate=False)),
        replay,
    )


def _run_export(
    session: Session, runner: Runner, call: Call, symbolic: bool
) -> torch.export.ExportedProgram:
    """Export inside all modes of a session, and explain what goes wrong."""
    model, fake = session.model, session.fake
    with entered(REPLACEMENTS, session):
        values = fake_batch(session.columns, fake, session.device)
        with fake, mock.patch.object(fake, "shape_env", ShapeEnv()):
            runner.find_tail(values)
        try:
            with entered(MODES, session):
                return _export(runner, values, symbolic)
        except LeftOpen:
            raise
        except Exception as error:
            session.opaque.asks_batch |= session.conditions.asks_batch
            eagerly = partial(_call_eagerly, runner, values, fake)
            explained = explain(model, call.loss_fn, error, eagerly, session.device)
            raise explained from (None if isinstance(error, TraceError) else error)


def normalized(exported: Exported, columns: Mapping[str, TensorMeta]) -> Trace:
    """Normalize an exported graph: the second half of `trace`.

    Args:
        exported: the first half; its graph is consumed.
        columns: the batch, as of `trace`.

    Raises:
        TraceError: as of `trace`.
    """
    constants = lift(exported)
    rewriting = Rewriting(exported.graph, constants, exported.sizes, columns, exported.buffers)
    run_passes(rewriting)
    return Trace(
        graph=rewriting.graph,
        outputs=exported.outputs,
        parameters=exported.parameters,
        tied=exported.tied,
        constants=rewriting.constants,
        columns=dict(columns),
        sources=frozenset(rewriting.sources),
        num_conditions=exported.num_conditions,
        parameter_writes=rewriting.parameter_writes,
        reads=(*exported.reads, *rewriting.reads),
        left=exported.left[0],
        remade=exported.remade,
        queried=exported.queried | rewriting.queried,
        replay=exported.replay,
    )


def _export(
    runner: Runner, values: tuple[torch.Tensor, ...], symbolic: bool
) -> torch.export.ExportedProgram:
    auto = torch.export.Dim.AUTO
    sizes = (tuple(dict.fromkeys(range(v.ndim), auto) for v in values),) if symbolic else None
    try:
        with quiet_export(), lean_export():
            return torch.export.export(runner, values, strict=False, dynamic_shapes=sizes)
    except (TraceError, LeftOpen):
        raise
    except Exception as error:
        try:
            with hidden_compilation(), quiet_export(), lean_export():
                return torch.export.export(runner, values, strict=False, dynamic_shapes=sizes)
        except Exception:
            raise error from None  # of the two errors, the usual one


def _call_eagerly(runner: Runner, values: tuple[torch.Tensor, ...], mode: FakeTensorMode) -> None:
    with mode:
        runner(*values)


def _refuse_trained_loss(loss_fn: LossFunction | None) -> None:
    if isinstance(loss_fn, nn.Module) and any(p.requires_grad for p in loss_fn.parameters()):
        raise TraceError(
            f"the loss function {type(loss_fn).__name__} has parameters of its own, which would "
            "not be trained; make it a part of the model."
        )


def parameter_names(model: nn.Module) -> tuple[dict[str, TensorMeta], dict[str, str]]:
    """Metadata of every parameter by its first name, and other names of tied ones (by identity)."""
    first: dict[int, str] = {}
    names: dict[str, TensorMeta] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if known == name:
            shape = tuple(parameter.shape)
            names[name] = TensorMeta(shape, parameter.dtype, parameter.requires_grad)
        else:
            tied[name] = known
    return names, tied
