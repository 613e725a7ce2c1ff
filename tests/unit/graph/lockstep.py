"""Loss and gradients of several ranks beside those of one, in one process.

Segments run twice: by autograd, and by their joint graphs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from merak.core.shards import join
from merak.graph.chunked_loss import in_chunks
from merak.graph.context_parallel.apply import context_parallel, gathered_operators
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
    chunk_bytes: int | None = None,
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
        chunk_bytes: the option `loss_chunk_bytes`.

    Returns:
        Number of collectives, by name.
    """
    one = _OneProcess(model, columns)
    if features is None:
        chosen = tensor_parallel(one.graph, None, degree, ep=ep).weights
    else:
        chosen = given_weights(one.graph, attributes_for(one.graph, features), degree)
    split, shards = cases.shard_model(one.graph, chosen, degree, sequence=sequence)
    obstacles: dict[str, str] = {}
    for own, runner in _runs(split, chunk_bytes, obstacles):
        shares = [cases.local(one.weights, shards, rank) for rank in range(degree)]
        one.compare_losses(RanksInTurns(degree), own, shares, runner)
        for rank in range(degree):
            found = {
                name: join([_gradient(s[name]) for s in shares], shards[name])
                if name in shards
                else shares[rank][name].grad
                for name in one.gradients
            }
            cases.assert_gradients_equal(found, one.gradients)
    assert all(why == on_autograd for why in obstacles.values()), obstacles
    return _num_calls(split)


def assert_parity_on_tokens(
    model: torch.nn.Module,
    columns: Mapping[str, torch.Tensor],
    degree: int,
    chunk_bytes: int | None = None,
) -> tuple[float, str | None]:
    """Loss and gradients of ranks that share tokens equal those of one.

    Args:
        model: trained by all ranks.
        columns: of the batch.
        degree: the number of ranks.
        chunk_bytes: the option `loss_chunk_bytes`.

    Returns:
        The loss, and what is said of operators that run on all tokens.
    """
    one = _OneProcess(model, columns)
    parallel = context_parallel(one.graph, None, degree)
    said = gathered_operators(one.graph, parallel)
    fitted, parallel = parallel.fit(one.graph)
    split = replace(fitted, segments=tuple(parallel(s)[0] for s in fitted.segments))
    obstacles: dict[str, str] = {}
    for own, runner in _runs(split, chunk_bytes, obstacles):
        shares = [cases.local(one.weights, {}, rank) for rank in range(degree)]
        one.compare_losses(RanksInTurns(degree, "cp"), own, shares, runner)
        summands = {name: [_gradient(s[name]) for s in shares] for name in one.gradients}
        found = {name: torch.stack(own).sum(0) for name, own in summands.items()}
        cases.assert_gradients_equal(found, one.gradients)
    assert not obstacles, obstacles
    return one.loss.item(), said


class _OneProcess:
    """What one process computes.

    Args:
        model: that it trains.
        columns: of its batch.

    Attributes:
        graph: of the model.
        weights: the model's.
        loss: of the batch.
        gradients: of those that have one.
    """

    def __init__(self, model: torch.nn.Module, columns: Mapping[str, torch.Tensor]) -> None:
        self.graph, self.weights = cases.traced(model, columns), cases.weights(model)
        self._others = {**cases.buffers(model, self.graph), **columns}
        alone = cases.local(self.weights, {}, 0)
        others = {name: tensor.clone() for name, tensor in self._others.items()}
        loss = cases.run_model(self.graph, alone, others)
        loss.backward()
        self.loss = loss.detach()
        self.gradients = {name: t.grad for name, t in alone.items() if t.grad is not None}

    def compare_losses(
        self,
        ranks: RanksInTurns,
        split: ModelGraph,
        shares: Sequence[Tensors],
        runner: cases.Runner,
    ) -> None:
        """Train all ranks, and compare their losses with the one process's.

        Args:
            ranks: all of them.
            split: the graph of each.
            shares: parameters of each, whose `grad` is then the rank's gradient.
            runner: of the graph's segments.
        """

        def train(rank: int) -> torch.Tensor:
            others = {name: tensor.clone() for name, tensor in self._others.items()}
            loss = cases.run_model(split, shares[rank], others, runner)
            loss.backward()
            return loss.detach()

        for own in ranks.run(train):
            torch.testing.assert_close(own, self.loss, rtol=1e-5, atol=0)


def _runs(
    split: ModelGraph, chunk_bytes: int | None, obstacles: dict[str, str]
) -> Iterator[tuple[ModelGraph, cases.Runner]]:
    """The model of a rank, and what runs it: autograd, then joint graphs."""
    for own in _in_chunks(split, chunk_bytes):
        yield own, cases.run_graph
        yield own, _joint_runner(own.segments, obstacles)


def _in_chunks(split: ModelGraph, chunk_bytes: int | None) -> Iterator[ModelGraph]:
    """The model of a rank with its head in chunks, which it must have, in two passes and in one."""
    if chunk_bytes is None:
        yield split
        return
    for one_pass in (False, True):
        made = [in_chunks(segment.graph, chunk_bytes, one_pass) for segment in split.segments]
        assert any(made)
        pairs = zip(split.segments, made, strict=True)
        yield replace(split, segments=tuple(replace(s, graph=g or s.graph) for s, g in pairs))


def _num_calls(split: ModelGraph) -> dict[str, int]:
    nodes = [node for segment in split.segments for node in segment.graph.nodes]
    return Counter(node.target.__name__ for node in nodes if node.target in SENDS)


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    """A gradient; zeros of a parameter that another rank has all of."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
