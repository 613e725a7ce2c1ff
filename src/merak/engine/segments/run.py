"""Running a segment on a whole microbatch: its forward, recomputation and backward.

The segment is a small autograd graph of its own: its inputs are detached leaves, and its backward
is called explicitly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch

from merak.core.random import set_random_state
from merak.engine.segments import joint_call
from merak.engine.segments.context import SegmentContext, ShardedParameters
from merak.engine.segments.joint_call import JointForward
from merak.engine.tensors_by_name import LeafGradients, TensorDict
from merak.graph.joint.generate import run as run_part
from merak.graph.program.program import SegmentProgram


@dataclass(slots=True)
class SavedForward:
    """The tensors that a segment's forward saves for its backward: leaves and outputs of its graph.

    Args:
        inputs: the leaves.
        outputs: None until they are recomputed, where activations are not saved.
        buffers: what the segment writes into, as its forward found it; for the recomputation alone,
            which must neither see the forward's writes nor repeat them.
    """

    offloaded: ClassVar[None] = None  # what autograd saves stays on the device

    inputs: list[torch.Tensor]
    outputs: tuple[torch.Tensor, ...] | None
    buffers: TensorDict


Saved = SavedForward | JointForward
"""What the forward of a segment leaves for its backward."""


def forward(run: SegmentProgram, values: TensorDict, ctx: SegmentContext, save: bool) -> Saved:
    """Run the forward of a segment from detached inputs, and save what its backward needs.

    Args:
        run: the segment.
        values: what it reads of others; gains its outputs.
        ctx: what else it reads.
        save: save its activations for the backward; else only if its program says so.
    """
    saves = (save or run.saved) and run.trains
    own = ctx if ctx.fsdp is None else _unsharded(run, ctx, ctx.fsdp)
    made: Saved
    if (begun := joint_call.begin_forward(run, values, own, saves)) is None:
        made = _forward(run, values, own, saves)
    else:
        made, call = begun
        call.end(run_part(call.part, call.given))
    if ctx.fsdp is not None:
        ctx.fsdp.end(run.segment.parameters)
    return made


def _forward(
    run: SegmentProgram, values: TensorDict, ctx: SegmentContext, saves: bool
) -> SavedForward:
    """Run the forward of a segment whose backward autograd runs."""
    leaves = [
        values[name].detach().requires_grad_(carries)
        for name, carries in zip(run.segment.inputs, run.gradient_inputs, strict=True)
    ]
    recomputes = run.trains and not saves
    before = {name: ctx.buffers[name].clone() for name in run.written} if recomputes else {}
    outputs = call_function(run, leaves, ctx, saves)
    values.update(zip(run.segment.outputs, outputs, strict=True))
    if not run.trains:
        return SavedForward([], (), {})
    return SavedForward(leaves, outputs if saves else None, before)


def recompute(run: SegmentProgram, saved: Saved, ctx: SegmentContext) -> None:
    """Recompute the activations that the forward did not save."""
    if _is_saved(saved):
        return
    own = ctx if ctx.fsdp is None else _unsharded(run, ctx, ctx.fsdp)
    _recompute(run, saved, own)
    if ctx.fsdp is not None:
        ctx.fsdp.end(run.segment.parameters)


def _is_saved(saved: Saved) -> bool:
    """Whether what a backward reads has been saved, or recomputed."""
    return (saved.saved if isinstance(saved, JointForward) else saved.outputs) is not None


def _recompute(run: SegmentProgram, saved: Saved, ctx: SegmentContext) -> None:
    if isinstance(saved, JointForward):
        call = joint_call.begin_recompute(run, saved, ctx)
        call.end(run_part(call.part, call.given))
        return
    before = replace(ctx, buffers={**ctx.buffers, **saved.buffers})
    saved.outputs = call_function(run, saved.inputs, before, save=True)


def backward(
    run: SegmentProgram,
    saved: Saved,
    gradients: TensorDict,
    ctx: SegmentContext,
    segment_done: Callable[[SegmentProgram], None],
) -> None:
    """Run a segment's backward.

    Args:
        run: the segment.
        saved: from the forward.
        gradients: loses those of its outputs and gains those of its inputs.
        ctx: as in the forward.
        segment_done: called afterwards.
    """
    if run.trains:
        own = ctx if ctx.fsdp is None else _unsharded(run, ctx, ctx.fsdp)
        if not _is_saved(saved):
            _recompute(run, saved, own)
        if not isinstance(saved, JointForward):
            _propagate(run, saved, gradients, own)
        elif (call := joint_call.begin_backward(run, saved, gradients, own)) is not None:
            call.end(run_part(call.part, call.given))
        if ctx.weight_gradients is not None:
            ctx.weight_gradients.segment_ended()
        if ctx.fsdp is not None:
            ctx.fsdp.end(run.segment.parameters)
    segment_done(run)


def _propagate(
    run: SegmentProgram, saved: SavedForward, gradients: TensorDict, ctx: SegmentContext
) -> None:
    leaf_gradients = partial(ctx.leaf_gradients, run, ctx.weights)
    assert saved.outputs is not None
    segment = run.segment
    propagate(
        segment.outputs, saved.outputs, segment.inputs, saved.inputs, gradients, leaf_gradients
    )


def _unsharded(run: SegmentProgram, ctx: SegmentContext, fsdp: ShardedParameters) -> SegmentContext:
    """What a segment reads, with its parameters gathered."""
    names = run.segment.parameters
    fsdp.begin(names)
    return replace(ctx, weights=fsdp.weights(names, ctx.weights))


def propagate(
    outputs: Sequence[str],
    results: Sequence[torch.Tensor],
    inputs: Sequence[str],
    leaves: Sequence[torch.Tensor],
    gradients: TensorDict,
    leaf_gradients: Callable[[], LeafGradients] = tuple,
) -> None:
    """Run the backward of one autograd graph.

    What later readers have given to one of its leaves enters the graph as well, first of all: so
    the readers' gradients are summed one by one, in the order of one process's autograd, and not
    those of each graph on their own.

    Args:
        outputs: names of its results.
        results: what the forward gave.
        inputs: names of its leaves.
        leaves: what the forward took.
        gradients: by name; loses those of the outputs and gains those of the inputs.
        leaf_gradients: gives further leaves, and what their readers in later graphs have given to
            each.
    """
    pairs = [
        (result, gradients.pop(name))
        for name, result in zip(outputs, results, strict=True)
        if name in gradients
    ]
    pairs = [(result, gradient) for result, gradient in pairs if result.requires_grad]
    if not pairs:
        return
    own = [(n, leaf) for n, leaf in zip(inputs, leaves, strict=True) if leaf.requires_grad]
    roots = [
        *leaf_gradients(),
        *((leaf, gradients.pop(n)) for n, leaf in own if n in gradients),
        *pairs,
    ]
    del pairs
    found: TensorDict = {}
    hooks = [leaf.register_hook(partial(_keep_layout, leaf, found, name)) for name, leaf in own]
    torch.autograd.backward([r for r, _ in roots], [g for _, g in roots])
    for (name, leaf), hook in zip(own, hooks, strict=True):
        hook.remove()
        if leaf.grad is not None:
            gradients[name] = found.get(name, leaf.grad)


def _keep_layout(
    leaf: torch.Tensor, found: TensorDict, name: str, gradient: torch.Tensor | None
) -> None:
    """Store a gradient that a leaf would lay out anew: kernels of other strides round otherwise.

    There is none where an opaque module has not used its input.
    """
    if gradient is not None and gradient.stride() != leaf.stride():
        found[name] = gradient


def call_function(
    program: SegmentProgram,
    inputs: Sequence[torch.Tensor],
    ctx: SegmentContext,
    save: bool,
) -> tuple[torch.Tensor, ...]:
    """Call a segment's compiled function with its parameters, buffers and inputs.

    Args:
        program: the segment.
        inputs: what it reads of other segments, in its order.
        ctx: what else it reads.
        save: whether autograd records.
    """
    segment = program.segment
    if program.draws:
        set_random_state(ctx.device, *ctx.random_key, segment.index)
    first = (
        *(ctx.weights[name] for name in segment.parameters),
        *(ctx.buffers[name] for name in segment.buffers),
        *(ctx.columns[name] for name in segment.columns),
    )
    last = tuple(ctx.batch_only[name] for name in segment.batch_only)
    with torch.set_grad_enabled(save):
        return ctx.function(program)(*first, *inputs, *last)
