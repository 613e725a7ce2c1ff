"""Loss and gradients of several tensor parallel ranks beside those of one, in one process.

Segments run twice: by autograd, and by their joint graphs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from merak.core.shards import join
from merak.graph.ir.ir import ModelGraph, Segment
from merak.graph.joint.derive import Given
from merak.graph.joint.generate import run as run_part
from merak.graph.joint.segment import JointSegment, joint_segment
from merak.graph.program.codegen import as_run
from merak.graph.tensor_parallel.apply import (
    attributes_for,
    given_weights,
    tensor_parallel,
)
from merak.graph.tensor_parallel.features import Features
from merak.ops.linear import SENDS
from tests.ranks_in_turns import RanksInTurns
from tests.unit.graph import tensor_parallel_cases as cases

Tensors = dict[str, torch.Tensor]


class _Joint(torch.autograd.Function):
    """A segment by its joint graph, as autograd sees it: one function of the segment's inputs."""

    @staticmethod
    def forward(ctx: Any, joint: JointSegment, num_outputs: int, *arguments: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.leaves = arguments
        ctx.joint, ctx.arguments = joint, [argument.detach() for argument in arguments]
        ctx.parts = joint.parts(ctx.arguments)
        results = run_part(ctx.parts.forward, list(ctx.arguments))
        outputs, ctx.saved = results[:num_outputs], results[num_outputs:]
        carries = zip(outputs, ctx.parts.carries, strict=True)
        ctx.mark_non_differentiable(*(own for own, carried in carries if not carried))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        given = Given(tuple(None if g is None else g.stride() for g in gradients))
        parts, saved = ctx.joint.parts(ctx.arguments, given), ctx.saved
        known = dict(zip(ctx.parts.saved, saved, strict=True))
        read = [
            *(ctx.arguments[number] for number in parts.reads),
            *(gradient for gradient in gradients if gradient is not None),
            *(known[name] for name in parts.saved),
            *(ctx.leaves[number] for number in parts.parameters),
        ]
        made = dict(zip(parts.inputs, run_part(parts.backward, read), strict=True))
        return None, None, *(made.get(number) for number in range(len(ctx.arguments)))


def _joint_runner(segments: Sequence[Segment], obstacles: dict[str, str]) -> cases.Runner:
    """Runs graphs by their joint graphs, where they have one; else says what stands against it."""
    by_graph = {segment.graph: segment for segment in segments}

    def run(graph: fx.Graph, inputs: Sequence[Any]) -> Sequence[Any]:
        segment = by_graph.get(graph)
        joint = None if segment is None else joint_segment(graph, as_run(graph))
        if segment is None or joint is None:
            return cases.run_graph(graph, inputs)
        if joint.parts([tensor.detach() for tensor in inputs]) is None:
            obstacles[segment.name] = joint.obstacle
            return cases.run_graph(graph, inputs)
        return _Joint.apply(joint, len(segment.outputs), *inputs)

    return run


def assert_parity(
    model: torch.nn.Module,
    columns: Mapping[str, torch.Tensor],
    features: Features | None,
    degree: int,
    *,
    sequence: bool = False,
    ep: int = 1,
    on_autograd: str = "",
) -> dict[str, int]:
    """Loss and gradients of `degree` ranks equal those of one, by autograd and by joint graphs.

    Args:
        model: trained by all ranks.
        columns: of the batch.
        features: how it is split; None for what the search finds.
        degree: the number of ranks.
        sequence: whether values lie in shares of the sequence.
        ep: expert parallel degree.
        on_autograd: why segments have no joint graph; empty where all have.

    Returns:
        Number of collectives, by name.
    """
    graph = cases.traced(model, columns)
    whole = cases.weights(model)
    others = {**cases.buffers(model, graph), **columns}
    alone = {name: t.clone().requires_grad_() for name, t in whole.items()}
    loss = cases.run_model(graph, alone, others)
    loss.backward()
    expected = {name: t.grad for name, t in alone.items() if t.grad is not None}

    if features is None:
        chosen = tensor_parallel(graph, None, degree, ep=ep).weights
    else:
        chosen = given_weights(graph, attributes_for(graph, features), degree)
    split, shards = cases.shard_model(graph, chosen, degree, sequence=sequence)
    obstacles: dict[str, str] = {}
    for runner in (cases.run_graph, _joint_runner(split.segments, obstacles)):
        shares = [cases.local(whole, shards, rank) for rank in range(degree)]
        losses = RanksInTurns(degree).run(_trainer(split, shares, others, runner))
        for own in losses:
            torch.testing.assert_close(own, loss.detach(), rtol=1e-5, atol=0)
        for rank in range(degree):
            found = {
                name: join([_gradient(s[name]) for s in shares], shards[name])
                if name in shards
                else shares[rank][name].grad
                for name in expected
            }
            cases.assert_gradients_equal(found, expected)
    assert all(why == on_autograd for why in obstacles.values()), obstacles
    return _num_calls(split)


def _trainer(
    split: ModelGraph,
    shares: Sequence[Tensors],
    others: Mapping[str, torch.Tensor],
    runner: cases.Runner,
) -> Callable[[int], torch.Tensor]:
    """Of a rank: the loss, whose gradients are then in the `grad` of the rank's parameters."""

    def train(rank: int) -> torch.Tensor:
        loss = cases.run_model(split, shares[rank], dict(others), runner)
        loss.backward()
        return loss.detach()

    return train


def _num_calls(split: ModelGraph) -> dict[str, int]:
    nodes = [node for segment in split.segments for node in segment.graph.nodes]
    return Counter(node.target.__name__ for node in nodes if node.target in SENDS)


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    """A gradient; zeros of a parameter that another rank has all of."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
