"""What cleaning makes of an exported graph: chance, gradients, writes, conversions, functions."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from merak.core.errors import TraceError
from merak.graph.ir.mutation import depending_on, find_mutations, is_mutating, mutated_arguments
from merak.graph.trace.normalize import is_random
from merak.graph.trace.trace import trace
from merak.graph.trace.traced import Trace
from tests.unit.graph import odd_models
from tests.unit.graph.odd_models import Layers
from tests.unit.graph.stages import metas

aten = torch.ops.aten


def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    graph = fx.Graph()
    x = graph.placeholder("x")
    return graph.call_function(target, tuple(x if a == "x" else a for a in args), kwargs)


@pytest.mark.parametrize(
    "node",
    [
        call(aten.dropout.default, "x", 0.1, True),
        call(aten.dropout_.default, "x", 0.1, True),
        call(aten.alpha_dropout.default, "x", 0.1, True),
        call(aten.feature_dropout.default, "x", 0.1, True),
        call(aten.native_dropout.default, "x", 0.1, True),
        call(aten.rand_like.default, "x"),
        call(aten.randn.default, [3]),
        call(aten.randint.default, 3, [3]),
        call(aten.randperm.default, 3),
        call(aten.bernoulli.default, "x"),
        call(aten.bernoulli_.float, "x", 0.5),
        call(aten.multinomial.default, "x", 2),
        call(aten.normal_.default, "x"),
        call(aten.uniform_.default, "x"),
        call(aten.exponential_.default, "x"),
        call(aten.rrelu.default, "x", 0.1, 0.3, True),
        call(aten.scaled_dot_product_attention.default, "x", "x", "x", None, 0.1),
        call(aten.scaled_dot_product_attention.default, "x", "x", "x", dropout_p=0.1),
        call(torch.ops.merak.autograd_function.default, ["x"], "some:function", "[]"),
    ],
    ids=lambda node: str(node.target),
)
def test_operators_that_draw(node: fx.Node) -> None:
    assert is_random(node)


@pytest.mark.parametrize(
    "node",
    [
        call(aten.dropout.default, "x", 0.1, False),
        call(aten.dropout.default, "x", 0.0, True),
        call(aten.rrelu.default, "x", 0.1, 0.3, False),
        call(aten.scaled_dot_product_attention.default, "x", "x", "x"),
        call(aten.scaled_dot_product_attention.default, "x", "x", "x", None, 0.0),
        call(aten.relu.default, "x"),
        call(aten.zeros_like.default, "x"),
        call(operator.getitem, "x", 0),
    ],
    ids=lambda node: str(node.target),
)
def test_operators_that_do_not_draw(node: fx.Node) -> None:
    assert not is_random(node)


def test_every_tagged_operator_draws_unless_told_not_to() -> None:
    seeded = torch.Tag.nondeterministic_seeded
    telling = {"p", "dropout", "dropout_p", "train", "training"}
    for name in dir(aten):
        packet = getattr(aten, name, None)
        for overload in getattr(packet, "overloads", list)():
            target = getattr(packet, overload)
            if telling.isdisjoint(a.name for a in target._schema.arguments):
                node = fx.Graph().call_function(target)
                assert is_random(node) == (seeded in target.tags), str(target)


@pytest.mark.parametrize(
    ("target", "args", "count"),
    [
        (aten.add_.Tensor, ("x", 1), 1),
        (aten.add.Tensor, ("x", 1), 0),
        (aten.view.default, ("x", [2]), 0),
        (aten._foreach_add_.Scalar, (["x", "x"], 1), 2),
        (aten.batch_norm.default, ("x", None, None, "x", "x", True, 0.1, 1e-5, False), 2),
        (aten.batch_norm.default, ("x", None, None, "x", "x", False, 0.1, 1e-5, False), 0),
        (aten.batch_norm.default, ("x", None, None, None, None, True, 0.1, 1e-5, False), 0),
        (operator.getitem, ("x", 0), 0),
    ],
)
def test_what_operators_write(target: Any, args: tuple[Any, ...], count: int) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(target, fx.node.map_aggregate(args, lambda a: x if a == "x" else a))
    assert len(mutated_arguments(node)) == count
    assert is_mutating(node) == bool(count)


def traced(model: nn.Module) -> Trace:
    return trace(model, metas(odd_models.BATCHES.get(type(model), odd_models.rows)()))


def targets(graph: fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


class WithoutEffect(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.dropout(self.a(x.detach()).to(torch.float32), 0.0, True)
        assert h.shape[0] == 4
        torch._assert_async(x.sum() == x.sum())
        return h.contiguous().to("cpu").mean()


def test_operators_without_effect_are_gone() -> None:
    assert targets(traced(WithoutEffect()).graph) in (
        ["aten.linear.default", "aten.mean.default"],
        ["aten.linear.default", "aten.contiguous.default", "aten.mean.default"],
    )


class Copies(Layers):
    """Conversions that copy, and constants that are written."""

    def forward(self, x: Tensor) -> Tensor:
        kept = x.to(torch.float32, copy=True)
        table = torch.tensor([1.0, 2.0])
        table[0] = 5.0
        return (self.a(kept) * table.sum()).mean()


def test_copies_stay() -> None:
    found = targets(traced(Copies()).graph)
    assert "aten.lift_fresh_copy.default" in found
    assert any(name.startswith("aten.to.") or "_to_copy" in name for name in found)


def test_no_nested_graphs_are_left() -> None:
    for model in (odd_models.WithoutGradient(), odd_models.Autocast()):
        graph = traced(model).graph
        assert not graph.find_nodes(op="get_attr")
        assert all(isinstance(n.target, str) or "wrap" not in str(n.target) for n in graph.nodes)


def test_what_runs_without_gradients_carries_none() -> None:
    graph = traced(odd_models.WithoutGradient()).graph
    reads = [n for n in graph.nodes if str(n.target) == "aten.linear.default"]
    carrying = {n.args[1].meta["name"]: n.meta["tensor"].requires_grad for n in reads[:1]}
    assert carrying == {"a.weight": True}
    detached = [n for n in reads if str(n.args[1].target) == "aten.detach.default"]
    assert len(detached) == 1
    assert not detached[0].meta["tensor"].requires_grad


def test_views_of_what_a_gradient_is_written_into_carry_it() -> None:
    graph = traced(odd_models.WrittenBufferOfOnes()).graph
    (zeros,) = (n for n in graph.nodes if str(n.target) == "aten.zeros.default")
    assert zeros.meta["tensor"].requires_grad
    (memory,) = find_mutations(graph).writers
    assert zeros.meta["storage"] == memory


def test_dependence_goes_through_writes() -> None:
    graph = traced(odd_models.ShiftedLabels()).graph
    labels = next(n for n in graph.find_nodes(op="placeholder") if n.meta["name"] == "labels")
    (zeros,) = (n for n in graph.nodes if "new_zeros" in str(n.target))
    assert zeros in depending_on(graph, [labels])


def test_frozen_parameters_carry_no_gradient() -> None:
    graph = traced(odd_models.Frozen()).graph
    linear = [n.meta["tensor"].requires_grad for n in graph.nodes if "linear" in str(n.target)]
    assert linear == [False, True, True]


# ---- autocast ----


def test_autocast_is_written_out() -> None:
    graph = traced(odd_models.Autocast()).graph
    dtypes = [n.meta["tensor"].dtype for n in graph.nodes if "linear" in str(n.target)]
    assert dtypes == [torch.float32, torch.bfloat16, torch.bfloat16, torch.float32]
    converted = [
        n.args[0].meta["name"]
        for n in graph.nodes
        if str(n.target) == "aten.to.dtype" and n.args[0].op == "placeholder"
    ]
    assert sorted(converted) == ["b.bias", "b.weight", "c.weight"]  # each once, as autocast keeps


# ---- functions with a backward of their own ----


class LocalFunction(Layers):
    def forward(self, x: Tensor) -> Tensor:
        class Double(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x * 2

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> Tensor:
                return gradient * 2

        return Double.apply(self.a(x)).mean()


class TakesFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Any) -> Tensor:
        return function(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class OddArgument(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return TakesFunction.apply(self.a(x), torch.relu).mean()


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (LocalFunction(), "Double, which is defined inside a function; define it at the top"),
        (OddArgument(), "TakesFunction, which takes arguments that are neither tensors nor plain"),
    ],
)
def test_functions_that_other_ranks_could_not_call(model: nn.Module, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        traced(model)


@pytest.mark.parametrize("kind", [odd_models.OwnBackward, odd_models.OwnBackwardByAnotherName])
def test_a_function_is_one_operator(kind: type[nn.Module]) -> None:
    found = targets(traced(kind()).graph)
    assert "merak.autograd_function.default" in found
    assert "aten.sign.default" not in found


def test_apply_is_put_back() -> None:
    before = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]
    traced(odd_models.OwnBackward())
    assert torch.autograd.Function.apply.__func__ is before  # type: ignore[attr-defined]


def test_a_graph_names_kinds_of_devices_and_no_number_of_one() -> None:
    class Counts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x + torch.full((), 2.0, device=torch.device("cpu", 0))).sum()

    graph = trace(Counts(), metas({"x": torch.ones(2, 3)})).graph
    named = [
        value
        for node in graph.nodes
        for value in (*node.args, *node.kwargs.values())
        if isinstance(value, torch.device)
    ]
    assert named and all(device.index is None for device in named)
