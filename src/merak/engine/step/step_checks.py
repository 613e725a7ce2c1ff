"""Before a training step or an evaluation: programs of shapes, microbatch counts, table indices."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence

import torch

from merak.core.errors import DataError, RefusedBatchError, ScheduleError, TraceError
from merak.core.mesh import largest
from merak.core.tensor_meta import Signature
from merak.engine.state import EngineState
from merak.graph.program.index_ranges import out_of_range


def make_programs(
    state: EngineState,
    signatures: Sequence[Signature],
    training: bool,
    of_all: Collection[Signature] | None = None,
    only_loss: bool = False,
) -> None:
    """Make the programs of some microbatches; a batch that one replica refuses, all refuse.

    Args:
        state: of this rank's engine.
        signatures: of each microbatch of this replica.
        training: whether the model is about to train on them.
        of_all: as of `Engine.train_step`.
        only_loss: whether an evaluation wants its loss alone.

    Raises:
        RefusedBatchError: the model cannot be traced for a shape that a replica has, or with what
            has changed in Python; on all ranks.
        TraceError: the same, on this rank: where there is one replica, whose ranks have one batch,
            or where Python state has changed on this rank alone.
    """
    programs = state.program_for
    refusal: TraceError | None = None
    is_anew = False
    try:
        is_anew = programs.refresh()
    except TraceError as error:
        refusal = error
    found = {(training, only_loss, one) for one in (signatures if of_all is None else of_all)}
    is_new = not found <= programs.prepared
    if of_all is None and state.mesh.dp == 1:
        is_new = False
    elif of_all is None:
        others = tuple(rank for rank in range(state.mesh.world_size) if rank != state.mesh.rank)
        with state.progress.waiting("whether batches have new shapes on", others):
            own = [is_new or refusal is not None, is_anew]
            is_new, is_anew = map(bool, largest(own, None))
        if is_anew:
            is_new = True
            programs.prepared.clear()
    if not is_new:  # nor on any other rank, which does not wait for this one
        if refusal is not None:
            raise refusal
        return
    try:
        for signature in signatures if refusal is None else ():
            programs(signature, training, only_loss)
    except TraceError as error:
        refusal = error
    refusals = state.gather(None if refusal is None else str(refusal), "programs of new shapes on")
    if any(refusals):
        raise RefusedBatchError(next(filter(None, refusals))) from refusal
    programs.prepared |= found


def check_indices(
    state: EngineState,
    what: str,
    signatures: Sequence[Signature],
    batches: Sequence[Mapping[str, torch.Tensor]],
    training: bool,
    only_loss: bool = False,
) -> None:
    """Refuse batches with indices beyond the tables that they are looked up in.

    Args:
        state: of this rank's engine.
        what: the step or evaluation that is about to run, for people to read.
        signatures: of each microbatch.
        batches: its columns, as far as this rank reads them.
        training: whether the model is about to train on them.
        only_loss: as of `make_programs`.

    Raises:
        DataError: an index is out of range.
    """
    for signature, batch in zip(signatures, batches, strict=True):
        problem = out_of_range(state.program_for(signature, training, only_loss).ranges, batch)
        if problem is not None:
            raise DataError(f"in {what}, {problem}")


def compare_microbatches(
    state: EngineState, signatures: Sequence[Signature], has_update: bool
) -> None:
    """Compare the replicas' microbatches before a training step, where their numbers matter.

    With ZeRO-2 and 3, gradients are reduced after every microbatch if all replicas have equally
    many, and else at the step's end. Their shapes matter where experts' places follow from them.

    Args:
        state: of this rank's engine.
        signatures: of each microbatch of this replica.
        has_update: whether the engine is given an optimizer's step to call.

    Raises:
        ScheduleError: an asynchronous schedule without an optimizer, or a layout that needs equal
            replicas without having them.
    """
    _check_counts(state, len(signatures), has_update)
    if state.mesh.spreads_experts and state.program_for.has_places:
        _check_shapes(state, signatures)


def _check_counts(state: EngineState, num_microbatches: int, has_update: bool) -> None:
    schedule = state.plan_for.base.schedule
    if not schedule.is_synchronous and not has_update:
        raise ScheduleError(
            f"schedule={schedule.name!r} updates the weights inside a step; give the engine an "
            "optimizer, or use a synchronous schedule such as '1f1b'."
        )
    spreads_experts = state.mesh.spreads_experts
    if schedule.is_synchronous and state.zero < 2 and not spreads_experts:
        return
    most, least = microbatch_counts(state, num_microbatches)
    if state.zero >= 2:
        state.reducer.every_microbatch = most == least
    if most == least:
        return
    if not schedule.is_synchronous:
        raise ScheduleError(
            f"schedule={schedule.name!r} updates the weights after every few microbatches on all "
            f"replicas together, but they have {least} to {most} in this step; leave the last "
            "part of an epoch out (dataloader_drop_last=True)."
        )
    if spreads_experts:
        raise ScheduleError(
            f"ep={state.mesh.ep} sends tokens to the experts of other replicas, but they have "
            f"{least} to {most} microbatches in this step; leave the last part of an epoch out "
            "(dataloader_drop_last=True), or use ep=1."
        )
    if state.zero == 3:
        raise ScheduleError(
            f"zero=3 gathers parameters on all replicas together, but they have {least} to "
            f"{most} microbatches here; leave the last part of an epoch out "
            "(dataloader_drop_last=True), or use zero=2."
        )


def _check_shapes(state: EngineState, signatures: Sequence[Signature]) -> None:
    mesh = state.mesh
    group = mesh.group("dp")
    if group is None:
        return
    shapes = [[meta.shape for _, meta in signature] for signature in signatures]
    digest = zlib.crc32(repr(shapes).encode())
    with state.progress.waiting("the shapes of microbatches on", mesh.peers("dp")):
        most, least = largest([digest, -digest], group)
    if most != -least:
        raise ScheduleError(
            "expert_capacity gives experts places by the shape of a microbatch, equally many for "
            f"each of ep={mesh.ep} replicas, but their microbatches differ in shape in this step; "
            "pad to one length (padding='max_length' of the tokenizer), or use "
            "expert_capacity=None."
        )


def microbatch_counts(state: EngineState, num_microbatches: int) -> tuple[int, int]:
    """The most and the least microbatches that a replica has; its replicas call it together."""
    mesh = state.mesh
    group = mesh.group("dp")
    if group is None:
        return num_microbatches, num_microbatches
    with state.progress.waiting("the number of microbatches on", mesh.peers("dp")):
        most, least = largest([num_microbatches, -num_microbatches], group)
    return most, -least
