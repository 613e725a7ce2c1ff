"""Segments whose backward is a graph: the calls of their forward, recomputation and backward.

Neither autograd nor hooks take part: the forward gives what the backward reads, and the backward
is a function of it. Whoever begins a call runs its part, whole or in pieces, and ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from merak.core.random import set_random_state
from merak.engine.segments.activation_offload import (
    ActivationOffload,
    OffloadedTensors,
    unpacked,
)
from merak.engine.segments.context import SegmentContext
from merak.engine.tensors_by_name import TensorDict
from merak.graph.joint.derive import Given, Strides
from merak.graph.joint.generate import Part
from merak.graph.joint.generate import run as run_part
from merak.graph.joint.segment import Functions, Like
from merak.graph.program.program import SegmentProgram


@dataclass(slots=True)
class JointForward:
    """What a segment's forward leaves for its backward.

    Args:
        parts: the functions of the segment.
        arguments: what the forward has read; of what the backward does not read, its layout alone
            where activations are offloaded.
        saved: what the backward reads besides; None until it is recomputed.
        kept: what the recomputation reads besides.
        buffers: numbers of the arguments that the segment writes into, and what the forward found
            there; for the recomputation alone.
        offloaded: where activations are offloaded to host memory, what is there; else None.
    """

    parts: Functions
    arguments: list[Any]
    saved: tuple[Any, ...] | None = None
    kept: tuple[torch.Tensor, ...] = ()
    buffers: dict[int, torch.Tensor] = field(default_factory=dict)
    offloaded: OffloadedTensors | None = None


@dataclass(slots=True)
class Call:
    """A part of a segment that is about to run.

    Args:
        part: its functions.
        given: what the first one takes, and empties.
        end: takes the results.
        draws_on: where it draws, from a state that has just been set; None where it does not.
    """

    part: Part
    given: list[Any]
    end: Callable[[tuple[torch.Tensor, ...]], object]
    draws_on: torch.device | None = None


def begin_forward(
    run: SegmentProgram, values: TensorDict, ctx: SegmentContext, save: bool
) -> tuple[JointForward, Call] | None:
    """What a segment's forward leaves for its backward, once its call has run.

    Args:
        run: the segment.
        values: what it reads of others; gains its outputs.
        ctx: what else it reads.
        save: save what the backward reads.

    Returns:
        None where the backward is no graph.
    """
    joint = run.joint
    if joint is None or ctx.observer is not None:
        return None
    arguments = _arguments(run, values, ctx)
    parts = joint.parts(arguments)
    if parts is None:
        return None
    made = JointForward(parts, arguments)
    if not save:
        first = len(run.segment.parameters)
        places = {name: first + i for i, name in enumerate(run.segment.buffers)}
        made.buffers = {places[name]: ctx.buffers[name].clone() for name in run.written}
    part = parts.forward if save else parts.plain
    end = partial(_end_forward, run, made, values, ctx, save)
    return made, call_of(run, part, list(arguments), end, ctx)


def call_of(
    run: SegmentProgram,
    part: Part,
    given: list[Any],
    end: Callable[[tuple[torch.Tensor, ...]], object],
    ctx: SegmentContext,
) -> Call:
    """A forward or recomputation, whose draws begin anew.

    Args:
        run: the segment.
        part: of its parts.
        given: what the part takes.
        end: takes the results.
        ctx: where it draws.
    """
    if run.draws:
        set_random_state(ctx.device, *ctx.random_key, run.segment.index)
    return Call(part, given, end, ctx.device if run.draws else None)


def _end_forward(
    run: SegmentProgram,
    made: JointForward,
    values: TensorDict,
    ctx: SegmentContext,
    save: bool,
    results: tuple[torch.Tensor, ...],
) -> None:
    """Hand on the outputs of a forward, and save what its backward reads of what else it has made.

    Else that is kept for a recomputation. Arguments are those of `begin_forward`.
    """
    num = len(run.segment.outputs)
    values.update(zip(run.segment.outputs, results[:num], strict=True))
    if not save:
        made.kept = results[num:]
        return
    made.saved = results[num:]
    if run.offload is not None and ctx.offload is not None:
        _offload(run, made, ctx.offload, [values[name] for name in run.offload])


def _offload(
    run: SegmentProgram,
    made: JointForward,
    offload: ActivationOffload,
    held: Sequence[torch.Tensor],
) -> None:
    """Offload what a forward leaves, without what is on the device anyway.

    Args:
        run: the segment.
        made: tensors of which what stands for them takes the place.
        offload: offloads them.
        held: values that other segments hold on the device.
    """
    first = _first_input(run)
    inputs = range(first, first + len(run.segment.inputs))
    others = [tensor for place, tensor in enumerate(made.arguments) if place not in inputs]
    read = {*made.parts.reads, *made.parts.weight_reads}
    tensors = made.offloaded = OffloadedTensors()
    for place in inputs:
        argument = made.arguments[place]
        own = offload.pack([argument], tensors, others) if place in read else [Like.of(argument)]
        made.arguments[place] = own[0]
    assert made.saved is not None
    made.saved = tuple(offload.pack(made.saved, tensors, others))
    offload.offload_saved(tensors, held)


def _fetch(run: SegmentProgram, saved: JointForward, offload: ActivationOffload) -> None:
    """Fetch what has been offloaded."""
    assert saved.offloaded is not None and saved.saved is not None
    offload.fetch(saved.offloaded)
    first = _first_input(run)
    for place in range(first, first + len(run.segment.inputs)):
        if not isinstance(saved.arguments[place], Like):
            saved.arguments[place] = unpacked(saved.arguments[place])
    saved.saved = tuple(map(unpacked, saved.saved))
    saved.offloaded = None


def begin_recompute(run: SegmentProgram, saved: JointForward, ctx: SegmentContext) -> Call:
    """A recomputation of what the forward did not save.

    Args:
        run: the segment.
        saved: from the forward; gains what the backward reads.
        ctx: as in the forward.
    """
    given = [*saved.arguments, *saved.kept]
    for place, buffer in saved.buffers.items():  # as the forward has found them
        given[place] = buffer

    def end(results: tuple[torch.Tensor, ...]) -> None:
        saved.saved, saved.kept = results, ()

    return call_of(run, saved.parts.recompute, given, end, ctx)


def begin_backward(
    run: SegmentProgram, saved: JointForward, gradients: TensorDict, ctx: SegmentContext
) -> Call | None:
    """The backward of a segment; None where nothing enters it.

    Args:
        run: the segment.
        saved: from the forward or recomputation.
        gradients: loses those of its outputs, and sums that later readers have given; gains those
            of its inputs.
        ctx: as in the forward.
    """
    if saved.offloaded is not None:
        assert ctx.offload is not None
        _fetch(run, saved, ctx.offload)
    tangents: list[torch.Tensor] = []
    strides: list[Strides | None] = []
    for name, carries in zip(run.segment.outputs, saved.parts.carries, strict=True):
        gradient = gradients.pop(name, None)
        if gradient is None or not carries:
            strides.append(None)
        else:
            tangents.append(gradient)
            strides.append(gradient.stride())
    if not tangents:
        return None
    later = _later(run, gradients, ctx)
    given = Given(tuple(strides), tuple([(number, known.stride()) for number, known in later]))
    parts = saved.parts if saved.parts.given == given else _changed(run, saved, given)
    assert saved.saved is not None
    names = run.segment.parameters
    arguments = [
        *map(saved.arguments.__getitem__, parts.reads),
        *[known for _, known in later],
        *tangents,
        *saved.saved,
        *map(ctx.weights.__getitem__, map(names.__getitem__, parts.parameters)),
    ]
    saved.saved = None
    return Call(parts.backward, arguments, partial(_give, run, saved, parts, gradients, ctx))


def _give(
    run: SegmentProgram,
    saved: JointForward,
    parts: Functions,
    gradients: TensorDict,
    ctx: SegmentContext,
    made: tuple[torch.Tensor, ...],
) -> None:
    """Hand on what a backward has made: gradients of inputs, and what weights' are made of later.

    Args:
        run: the segment.
        saved: from the forward.
        parts: its functions.
        gradients: gains those of the segment's inputs.
        ctx: as in the forward.
        made: results of the backward.
    """
    names = run.segment.parameters
    first, num = _first_input(run), len(parts.inputs)
    inputs = run.segment.inputs
    gradients.update(zip([inputs[n - first] for n in parts.inputs], made[:num], strict=True))
    if parts.weights is not None:
        assert ctx.weight_gradients is not None
        arguments = [
            *map(saved.arguments.__getitem__, parts.weight_reads),
            *made[num:],
            *map(ctx.weights.__getitem__, map(names.__getitem__, parts.weight_parameters)),
        ]
        # What it reads of gathered parameters is freed behind this backward.
        at_once = ctx.fsdp is not None and any(n < len(names) for n in parts.weight_reads)
        ctx.weight_gradients.add(
            run.segment.index, partial(run_part, parts.weights, arguments), at_once
        )


def _later(
    run: SegmentProgram, gradients: TensorDict, ctx: SegmentContext
) -> list[tuple[int, torch.Tensor]]:
    """Sums that later readers have given, by number of the parameter or input; inputs' are popped.

    They enter the backward, which adds what each of its own readers gives one by one: the order in
    which one process's autograd sums.
    """
    found = []
    for leaf, known in ctx.leaf_gradients(run, ctx.weights):
        name = next(name for name in run.repeated if ctx.weights[name] is leaf)
        found.append((run.segment.parameters.index(name), known))
    first = _first_input(run)
    for number, (name, carries) in enumerate(
        zip(run.segment.inputs, run.gradient_inputs, strict=True), first
    ):
        if carries and name in gradients:
            found.append((number, gradients.pop(name)))
    return found


def _first_input(run: SegmentProgram) -> int:
    segment = run.segment
    return len(segment.parameters) + len(segment.buffers) + len(segment.columns)


def _changed(run: SegmentProgram, saved: JointForward, given: Given) -> Functions:
    """Functions for gradients that the forward has not expected."""
    assert run.joint is not None and saved.saved is not None
    parts = run.joint.parts(saved.arguments, given)
    assert parts is not None, run.joint.obstacle
    known = dict(zip(saved.parts.saved, saved.saved, strict=True))
    saved.saved = tuple([known[name] for name in parts.saved])
    return parts


def _arguments(run: SegmentProgram, values: TensorDict, ctx: SegmentContext) -> list[torch.Tensor]:
    segment, detached = run.segment, torch.Tensor.detach
    return [
        *map(detached, map(ctx.weights.__getitem__, segment.parameters)),
        *map(ctx.buffers.__getitem__, segment.buffers),
        *map(ctx.columns.__getitem__, segment.columns),
        *map(detached, map(values.__getitem__, segment.inputs)),
        *map(ctx.batch_only.__getitem__, segment.batch_only),
    ]
