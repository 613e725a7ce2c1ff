"""Several tensor parallel ranks in one process: every node runs on all ranks before the next one.

Collectives act on the list of all ranks' tensors, forward and backward, so autograd runs the ranks
in lockstep too. No process group is needed. A loss over split classes and statistics over a split
dim, which exchange numbers inside, are torch's own over all of them here; on real ranks they are
tested for themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import fx
from torch.nn import functional

from merak.core.mesh import Mesh
from merak.core.shards import ParameterShard, join, take
from merak.graph.tensor_parallel.apply import (
    attributes_for,
    given_weights,
    tensor_parallel,
)
from merak.graph.tensor_parallel.features import Features
from merak.graph.trace.opaque.operator import is_opaque
from merak.graph.trace.opaque.run import opaque_function
from merak.ops import collectives
from merak.ops.sharded_statistics import (
    sharded_layer_norm,
    sharded_rms_norm,
    sharded_std,
    sharded_var,
    sharded_weight_norm,
)
from tests.unit.graph import tensor_parallel_cases as cases


class _Together(torch.autograd.Function):
    """A function of all ranks' tensors, with another one for all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, forward: Any, backward: Any, *tensors: torch.Tensor) -> Any:
        ctx.undo = backward
        return tuple(forward(list(tensors)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, None, *ctx.undo(list(gradients))


def _keep(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.clone() for t in tensors]


def _sum(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.stack(tensors).sum(0) for _ in tensors]


def _sum_parts(
    dim: int, sizes: Sequence[int], whole: Sequence[int]
) -> Callable[[list[torch.Tensor]], Any]:
    def backward(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        split = [list(g.split(sizes, dim)) for g in gradients]
        for i in whole:
            total = torch.stack([pieces[i] for pieces in split]).sum(0)
            for pieces in split:
                pieces[i] = total
        return [torch.cat(pieces, dim) for pieces in split]

    return backward


def _sum_shared(copies: int) -> Callable[[list[torch.Tensor]], Any]:
    def backward(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        groups = [gradients[i : i + copies] for i in range(0, len(gradients), copies)]
        return [torch.stack(group).sum(0) for group in groups for _ in group]

    return backward


def _divide(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t / len(tensors) for t in tensors]


def _gather(
    dim: int, parts: tuple[int, ...], copies: int = 1
) -> Callable[[list[torch.Tensor]], Any]:
    return lambda ts: [join(ts, ParameterShard(dim, parts, len(ts), copies=copies)) for _ in ts]


def _slice(dim: int, parts: tuple[int, ...]) -> Callable[[list[torch.Tensor]], Any]:
    return lambda ts: [take(t, ParameterShard(dim, parts, len(ts)), i) for i, t in enumerate(ts)]


def _share_out(
    dim: int, parts: tuple[int, ...], copies: int
) -> Callable[[list[torch.Tensor]], Any]:
    def backward(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        shard = ParameterShard(dim, parts, len(gradients), copies=copies)
        return [take(g, shard, rank) / copies for rank, g in enumerate(gradients)]

    return backward


def _scatter(dim: int, parts: tuple[int, ...]) -> Callable[[list[torch.Tensor]], Any]:
    return lambda ts: _slice(dim, parts)(_sum(ts))


def _together(target: Any, tensors: Sequence[torch.Tensor], args: Sequence[Any]) -> Any:
    name = target.__name__
    if name == "copy_to":
        return _Together.apply(_keep, _sum, *tensors)
    if name == "copy_parts_to":
        return _Together.apply(_keep, _sum_parts(*args[:3]), *tensors)
    if name == "copy_shared_to":
        return _Together.apply(_keep, _sum_shared(args[0]), *tensors)
    if name == "leave_partial_grad":
        return _Together.apply(_keep, _divide, *tensors)
    if name == "replicate_to_partial":
        return _Together.apply(_divide, _keep, *tensors)
    if name == "reduce_from":
        return _Together.apply(_sum, _keep, *tensors)
    layout = (args[0], args[1])
    if name == "gather_shared":
        shared = _gather(*layout, args[2]), _share_out(*layout, args[2])
        return _Together.apply(*shared, *tensors)
    if name == "reduce_scatter_to":
        return _Together.apply(_scatter(*layout), _gather(*layout), *tensors)
    if name == "gather_with_partial_grad":
        return _Together.apply(_gather(*layout), _scatter(*layout), *tensors)
    pair = (_gather(*layout), _slice(*layout))
    return _Together.apply(*(pair if name == "gather_from" else reversed(pair)), *tensors)


_COLLECTIVES = (
    "copy_to", "copy_shared_to",
    "copy_parts_to", "leave_partial_grad", "replicate_to_partial", "reduce_from", "gather_from",
    "gather_shared",
    "slice_to",
    "reduce_scatter_to", "gather_with_partial_grad"
)  # fmt: skip


_WHOLE: dict[Any, Callable[..., torch.Tensor]] = {
    sharded_layer_norm: lambda x, weight, bias, eps, dims, axis: functional.layer_norm(
        x, x.shape[-dims:], weight, bias, eps
    ),
    sharded_rms_norm: lambda x, weight, eps, dims, axis: functional.rms_norm(
        x, x.shape[-dims:], weight, eps
    ),
    sharded_weight_norm: lambda weight, norms, dim, axis: torch._weight_norm(weight, norms, dim),
    sharded_var: lambda x, dims, correction, keepdim, axis: x.var(
        dims, correction=correction, keepdim=keepdim
    ),
    sharded_std: lambda x, dims, correction, keepdim, axis: x.std(
        dims, correction=correction, keepdim=keepdim
    ),
}
"""Statistics over a split dim, as torch takes them of the whole."""


class Lockstep:
    """Runs graphs on `degree` ranks; every value is the list of what the ranks hold."""

    def __init__(self, degree: int, patch: pytest.MonkeyPatch) -> None:
        self.degree = degree
        self.patch = patch
        self.num_calls: dict[str, int] = {}

    def run(self, graph: fx.Graph, inputs: Sequence[list[Any]]) -> list[list[Any]]:
        values = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))
        for node in graph.nodes:
            if node.op == "call_function":
                values[node] = self.call(node, values)
        (output,) = graph.find_nodes(op="output")
        return [values[n] for n in output.args[0]]

    def call(self, node: fx.Node, values: dict[fx.Node, list[Any]]) -> list[Any]:
        assert callable(node.target)
        name = getattr(node.target, "__name__", "")
        if name in _COLLECTIVES:
            self.num_calls[name] = self.num_calls.get(name, 0) + 1
            source = node.args[0]
            assert isinstance(source, fx.Node)
            return list(_together(node.target, values[source], node.args[1:]))
        if name == "vocab_parallel_cross_entropy":
            self.num_calls[name] = self.num_calls.get(name, 0) + 1
            return self.cross_entropy(node, values)
        if node.target in _WHOLE:
            self.num_calls[name] = self.num_calls.get(name, 0) + 1
            return self.statistics(node, values)
        target = opaque_function(node.meta["opaque"]) if is_opaque(node) else node.target
        state = torch.get_rng_state()
        results, states = [], []
        for rank in range(self.degree):
            torch.set_rng_state(state)
            with self.as_rank(rank):
                args, kwargs = fx.map_arg(
                    (node.args, dict(node.kwargs)), lambda n, r=rank: values[n][r]
                )
                results.append(target(*args, **kwargs))
            states.append(torch.get_rng_state())
        assert all(torch.equal(states[0], s) for s in states), f"{node} draws unevenly"
        return results

    def cross_entropy(self, node: fx.Node, values: dict[fx.Node, list[Any]]) -> list[Any]:
        logits, target, weight, *how, (dim, size, _) = node.args
        assert isinstance(logits, fx.Node) and isinstance(target, fx.Node)
        layout = (dim, (size,))
        whole = _Together.apply(_gather(*layout), _slice(*layout), *values[logits])
        weights = [None] * self.degree if weight is None else values[weight]
        operands = zip(whole, values[target], weights, strict=True)
        return [torch.ops.aten.cross_entropy_loss(*own, *how) for own in operands]

    def statistics(self, node: fx.Node, values: dict[fx.Node, list[Any]]) -> list[Any]:
        """By torch's own operator, over the last dim: it is the split one of every test here."""
        operands = [n for n in node.args if isinstance(n, fx.Node)]
        wholes = {}
        for operand in operands:
            own = values[operand]
            parts = (own[0].shape[-1] * self.degree,)
            layout = (own[0].ndim - 1, parts)
            wholes[operand] = _Together.apply(_gather(*layout), _slice(*layout), *own)
        results = []
        for rank in range(self.degree):
            args = [wholes[n][rank] if isinstance(n, fx.Node) else n for n in node.args]
            results.append(_WHOLE[node.target](*args))
        if not results[0].ndim or results[0].shape[-1] == 1:
            return list(_Together.apply(_keep, _keep, *results))
        layout = (results[0].ndim - 1, (results[0].shape[-1],))
        return list(_Together.apply(_slice(*layout), _gather(*layout), *results))

    @contextmanager
    def as_rank(self, rank: int) -> Iterator[None]:
        mesh = Mesh(1, self.degree, 1, rank, torch.device("cpu"), None)
        with self.patch.context() as patch:
            patch.setattr(collectives, "current_mesh", lambda: mesh)
            yield


def assert_parity(
    model: torch.nn.Module,
    columns: Mapping[str, torch.Tensor],
    features: Features | None,
    degree: int,
    patch: pytest.MonkeyPatch,
    *,
    sequence: bool = False,
    ep: int = 1,
) -> Lockstep:
    """Loss and gradients of `degree` ranks in lockstep equal those of one; collectives counted."""
    graph = cases.traced(model, columns)
    whole = cases.weights(model)
    others = {**cases.buffers(model, graph), **columns}
    alone = {name: t.clone().requires_grad_() for name, t in whole.items()}
    loss = cases.run_model(graph, alone, others)
    loss.backward()

    if features is None:
        chosen = tensor_parallel(graph, None, degree, ep=ep).weights
    else:
        chosen = given_weights(graph, attributes_for(graph, features), degree)
    split, shards = cases.shard_model(graph, chosen, degree, sequence=sequence)
    shares = [cases.local(whole, shards, rank) for rank in range(degree)]
    ranks = Lockstep(degree, patch)
    losses = cases.run_model(
        split,
        {name: [share[name] for share in shares] for name in whole},
        {name: [t] * degree for name, t in others.items()},
        ranks.run,
    )
    torch.autograd.backward(losses, [torch.ones(())] * degree)
    for own in losses:
        torch.testing.assert_close(own, loss, rtol=1e-5, atol=0)
    expected = {name: t.grad for name, t in alone.items() if t.grad is not None}
    for rank in range(degree):
        found = {
            name: join([_gradient(s[name]) for s in shares], shards[name])
            if name in shards
            else shares[rank][name].grad
            for name in expected
        }
        cases.assert_gradients_equal(found, expected)
    return ranks


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    """A gradient; zeros of a parameter that another rank has all of."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
