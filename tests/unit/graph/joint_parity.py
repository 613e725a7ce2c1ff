"""A segment's joint graph beside autograd, on real tensors: outputs and gradients to the bit."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from merak.graph.ir.ir import ModelGraph, Segment
from merak.graph.joint.generate import run as run_part
from merak.graph.joint.segment import joint_segment
from merak.graph.program.codegen import as_run, runnable
from tests.unit.graph.stages import Pipeline


def assert_bits_of_autograd(
    graph: ModelGraph, model: torch.nn.Module, segment: Segment, batch: Mapping[str, torch.Tensor]
) -> None:
    """Compare a segment's joint graph with its backward by autograd, on a batch."""
    pipeline = Pipeline(graph, model)
    values = {**batch, **pipeline.derive(batch), **pipeline.buffers}
    torch.manual_seed(1)
    for record in pipeline.forward(batch):
        values |= {name: tensor.detach() for name, tensor in record.results.items()}
    parameters = [pipeline.parameters[name] for name in segment.parameters]
    names = (*segment.buffers, *segment.columns, *segment.inputs, *segment.batch_only)
    others = [values[name].detach().clone() for name in names]
    first = len(segment.buffers) + len(segment.columns)
    inputs = others[first : first + len(segment.inputs)]
    for name, tensor in zip(segment.inputs, inputs, strict=True):
        tensor.requires_grad_(graph.values[name].requires_grad)
    model.zero_grad()
    expected = runnable(segment.graph)(*parameters, *others)
    carrying = [output for output in expected if output.requires_grad]
    tangents = [torch.randn_like(output) for output in carrying]
    torch.autograd.backward(carrying, tangents)
    leaves = {**dict(enumerate(parameters)), **dict(enumerate(inputs, len(parameters) + first))}
    gradients = {number: leaf.grad for number, leaf in leaves.items() if leaf.grad is not None}
    model.zero_grad()

    joint = joint_segment(segment.graph, as_run(segment.graph))
    assert joint is not None, segment.name
    arguments = [tensor.detach() for tensor in (*parameters, *others)]
    parts = joint.parts(arguments)
    assert parts is not None, joint.obstacle
    results = run_part(parts.forward, list(arguments))
    outputs, saved = results[: len(expected)], results[len(expected) :]
    assert all(torch.equal(own, other) for own, other in zip(outputs, expected, strict=True))
    own = [parameters[number] for number in parts.parameters]
    read = [arguments[number] for number in parts.reads]
    made = run_part(parts.backward, [*read, *tangents, *saved, *own])
    found = dict(zip(parts.inputs, made, strict=False))
    found |= {number: parameters[number].grad for number in parts.parameters}
    assert found.keys() == gradients.keys()
    for number, gradient in gradients.items():
        assert torch.equal(found[number], gradient), number
