"""Running a segment whose activations are offloaded to host memory (`activation_offload`).

Its autograd graph holds neither its inputs nor its outputs: gradients enter at the edges of the
graph, and those of the inputs are left by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from merak.engine.segments.activation_offload import (
    ActivationOffload,
    OffloadedTensors,
    catch_gradients,
)
from merak.engine.tensors_by_name import LeafGradients, TensorDict
from merak.graph.program.program import SegmentProgram

Saving = Callable[[Sequence[torch.Tensor]], AbstractContextManager[None]]
"""Context in which saved tensors are offloaded, apart from those that are given here."""

Run = Callable[[Sequence[torch.Tensor], Saving], tuple[torch.Tensor, ...]]
"""Runs a segment on its inputs."""


@dataclass(slots=True)
class OffloadedForward:
    """A segment's forward whose activations are offloaded: edges of its autograd graph.

    Args:
        tensors: the activations, wherever they are.
        edges: by name of an output that carries a gradient, where that enters.
        entries: by name of an input that carries one, where what later readers gave enters.
        gradients: of the inputs, once the backward has been run.
    """

    tensors: OffloadedTensors = field(default_factory=OffloadedTensors)
    edges: dict[str, GradientEdge] = field(default_factory=dict)
    entries: dict[str, GradientEdge] = field(default_factory=dict)
    gradients: TensorDict = field(default_factory=dict)


def forward(
    program: SegmentProgram, values: TensorDict, offload: ActivationOffload, run: Run
) -> OffloadedForward:
    """Run the forward of a segment, and copy its activations to host memory.

    Args:
        program: the segment.
        values: what it reads of others; gains its outputs.
        offload: offloads its activations.
        run: runs it.
    """
    assert program.offload is not None
    segment, offloaded = program.segment, OffloadedForward()
    carries, inputs = program.gradient_inputs, [values[name] for name in segment.inputs]
    entered = catch_gradients(segment.inputs, inputs, carries, offloaded.gradients)
    offloaded.entries.update(
        (name, get_gradient_edge(value))
        for name, value in zip(segment.inputs, entered, strict=True)
        if value.requires_grad
    )
    outputs = run(entered, lambda held: offload.saving(offloaded.tensors, held))
    values.update(zip(segment.outputs, (output.detach() for output in outputs), strict=True))
    for name, output in zip(segment.outputs, outputs, strict=True):
        if output.requires_grad:
            offloaded.edges[name] = get_gradient_edge(output)
    offload.offload_saved(offloaded.tensors, [values[name] for name in program.offload])
    return offloaded


def backward(
    program: SegmentProgram,
    offloaded: OffloadedForward,
    gradients: TensorDict,
    offload: ActivationOffload,
    leaf_gradients: Callable[[], LeafGradients] = tuple,
) -> None:
    """Run the backward of a segment whose activations come back from host memory.

    Args:
        program: the segment.
        offloaded: from the forward.
        gradients: by name; loses those of the outputs and gains those of the inputs.
        offload: offloads its activations.
        leaf_gradients: as of `whole.propagate`.
    """
    offload.fetch(offloaded.tensors)
    found = [(n, gradients.pop(n)) for n in program.segment.outputs if n in gradients]
    found = [(name, gradient) for name, gradient in found if name in offloaded.edges]
    if not found:
        return
    # As in `whole.propagate`: later readers' sum is the first that the graph adds to.
    known = [(edge, gradients.pop(n)) for n, edge in offloaded.entries.items() if n in gradients]
    roots: list[tuple[Any, torch.Tensor]] = [
        *leaf_gradients(),
        *known,
        *((offloaded.edges[name], gradient) for name, gradient in found),
    ]
    torch.autograd.backward([edge for edge, _ in roots], [gradient for _, gradient in roots])
    for name in program.segment.inputs:
        if name in offloaded.gradients:
            gradients[name] = offloaded.gradients.pop(name)
