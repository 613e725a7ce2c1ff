"""Runs one segment on a whole microbatch: its forward, recomputation and backward.

The segment is a small autograd graph of its own: its inputs are detached leaves, and its backward
is called explicitly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch

from merak.core.random import set_random_state
from merak.engine.segments import run_offloaded as offloaded
from merak.engine.segments.context import Surroundings
from merak.engine.segments.run_offloaded import Away, Saving
from merak.engine.tensors_by_name import ParamLeaves, Sums, TensorDict
from merak.graph.program.program import SegmentProgram
from merak.graph.program.selective import SavedResults


@dataclass(slots=True)
class Saved:
    """A segment's forward, kept for its backward: leaves and outputs of its autograd graph.

    Args:
        inputs: the leaves.
        outputs: None until they are recomputed, where activations are not kept.
        buffers: what the segment writes into, as its forward found it; for the recomputation alone,
            which must neither see the forward's writes nor repeat them.
        recording: of the operators that the recomputation leaves out.
        away: what is kept instead of inputs and outputs, where activations wait in host memory.
    """

    inputs: list[torch.Tensor]
    outputs: tuple[torch.Tensor, ...] | None
    buffers: TensorDict
    recording: SavedResults | None = None
    away: Away | None = None


def forward(run: SegmentProgram, values: TensorDict, around: Surroundings, keep: bool) -> Saved:
    """Run a segment.

    Args:
        run: the segment.
        values: what it reads of others; gains its outputs.
        around: what else it reads.
        keep: keep its activations for the backward; else only if its program says so.
    """
    stays = (keep or run.saved) and run.trains
    if stays and run.offload is not None and around.offload is not None:

        def record(inputs: Sequence[torch.Tensor], saving: Saving) -> tuple[torch.Tensor, ...]:
            return call(run, inputs, around, True, saving)

        with in_turn(run, around):
            away = offloaded.forward(run, values, around.offload, record)
        return Saved([], (), {}, away=away)
    leaves = [
        values[name].detach().requires_grad_(carries)
        for name, carries in zip(run.segment.inputs, run.gradient_inputs, strict=True)
    ]
    again = run.trains and not stays
    before = {name: around.buffers[name].clone() for name in run.written} if again else {}
    recording = None
    with in_turn(run, around):
        if again and run.selective is not None:
            with run.selective.recording(around.device) as recording:
                # As for the backward, which may make kernels give more than without.
                outputs = tuple(output.detach() for output in call(run, leaves, around, True))
        else:
            outputs = call(run, leaves, around, stays)
    values.update(zip(run.segment.outputs, outputs, strict=True))
    if not run.trains:
        return Saved([], (), {})
    return Saved(leaves, outputs if stays else None, before, recording)


def recompute(run: SegmentProgram, saved: Saved, around: Surroundings) -> None:
    """Bring back the activations that the forward did not keep."""
    if saved.outputs is None:
        with in_turn(run, around):
            _bring_back(run, saved, around)


def _bring_back(run: SegmentProgram, saved: Saved, around: Surroundings) -> None:
    before = replace(around, buffers={**around.buffers, **saved.buffers})
    if saved.recording is None or run.selective is None:
        saved.outputs = call(run, saved.inputs, before, keep=True)
        return
    with run.selective.replaying(saved.recording, around.device):
        saved.outputs = call(run, saved.inputs, before, keep=True)
    saved.recording = None


def backward(
    run: SegmentProgram,
    saved: Saved,
    gradients: TensorDict,
    around: Surroundings,
    segment_done: Callable[[SegmentProgram], None],
) -> None:
    """Run a segment's backward.

    Args:
        run: the segment.
        saved: from the forward.
        gradients: loses those of its outputs and gains those of its inputs.
        around: as in the forward.
        segment_done: called afterwards.
    """
    if run.trains:
        with in_turn(run, around):
            if saved.outputs is None:
                _bring_back(run, saved, around)
            _go_back(run, saved, gradients, around)
    segment_done(run)


def _go_back(
    run: SegmentProgram, saved: Saved, gradients: TensorDict, around: Surroundings
) -> None:
    sums = partial(around.begin_sums, run, around.weights)
    if saved.away is not None:
        assert around.offload is not None
        offloaded.backward(run, saved.away, gradients, around.offload, sums)
        return
    assert saved.outputs is not None
    segment = run.segment
    propagate(segment.outputs, saved.outputs, segment.inputs, saved.inputs, gradients, sums)


@contextmanager
def in_turn(run: SegmentProgram, around: Surroundings) -> Iterator[None]:
    """Inside, the segment has its parameters, where replicas hold shares of them."""
    if around.sharded is not None:
        around.sharded.begin(run.segment.parameters)
    yield
    if around.sharded is not None:
        around.sharded.end(run.segment.parameters)


def propagate(
    outputs: Sequence[str],
    results: Sequence[torch.Tensor],
    inputs: Sequence[str],
    leaves: Sequence[torch.Tensor],
    gradients: TensorDict,
    sums: Callable[[], Sums] = tuple,
) -> None:
    """One autograd graph's backward.

    What later readers have given to one of its leaves enters the graph as well, first of all: so
    the readers' gradients are summed one by one, in the order of one process's autograd, and not
    those of each graph on their own.

    Args:
        outputs: names of its results.
        results: what the forward gave.
        inputs: names of its leaves.
        leaves: what the forward took.
        gradients: by name; loses those of the outputs and gains those of the inputs.
        sums: gives further leaves, and what their readers in later graphs have given to each.
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
    roots = [*sums(), *((leaf, gradients.pop(n)) for n, leaf in own if n in gradients), *pairs]
    del pairs
    found: TensorDict = {}
    hooks = [leaf.register_hook(partial(_keep_layout, leaf, found, name)) for name, leaf in own]
    torch.autograd.backward([r for r, _ in roots], [g for _, g in roots])
    for (name, leaf), hook in zip(own, hooks, strict=True):
        hook.remove()
        if leaf.grad is not None:
            gradients[name] = found.get(name, leaf.grad)


def _keep_layout(leaf: torch.Tensor, found: TensorDict, name: str, gradient: torch.Tensor) -> None:
    """Keep a gradient that a leaf would lay out anew: kernels of other strides round otherwise."""
    if gradient.stride() != leaf.stride():
        found[name] = gradient


def call(
    program: SegmentProgram,
    inputs: Sequence[torch.Tensor],
    around: Surroundings,
    keep: bool,
    saving: Saving | None = None,
) -> tuple[torch.Tensor, ...]:
    """Call a segment's function.

    Args:
        program: the segment.
        inputs: what it reads of other segments, in its order.
        around: what else it reads.
        keep: whether autograd records.
        saving: where what autograd saves goes; None leaves it on the device.
    """
    segment = program.segment
    if program.draws:
        set_random_state(around.device, *around.random_key, segment.index)

    def compute(weights: ParamLeaves) -> tuple[torch.Tensor, ...]:
        first = (
            *(weights[name] for name in segment.parameters),
            *(around.buffers[name] for name in segment.buffers),
            *(around.columns[name] for name in segment.columns),
        )
        last = tuple(around.batch_only[name] for name in segment.batch_only)
        with nullcontext() if saving is None else saving((*first, *last)):
            return program.function(*first, *inputs, *last)

    with torch.set_grad_enabled(keep):
        if around.sharded is None:
            return compute(around.weights)
        return around.sharded.call(segment.parameters, around.weights, compute)
