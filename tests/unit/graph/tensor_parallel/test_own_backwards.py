"""Autograd functions on shards and in halves of a microbatch: gradients are those of the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.autograd import Function

from merak.core.errors import ShardError
from merak.graph.ir.ir import ModelGraph, Segment
from merak.graph.sub_pipelining.sub_microbatch import SampleDims, split_segment
from merak.graph.tensor_parallel.apply import tensor_parallel
from merak.graph.tensor_parallel.features import Column
from tests.tiers import one_in
from tests.unit.graph import own_backwards as own
from tests.unit.graph import tensor_parallel_cases as cases
from tests.unit.graph.lockstep import assert_parity

BATCH = 4
SAME_EVERY_TIME = [f for f in (*own.EVERYWHERE, *own.NOWHERE) if f not in (own.Counting, own.Noisy)]


OF_LAST_SIZE = (own.LastSize, own.SizeInAFill, own.SizeDecides, own.SizeDecidesWhichTensor)
"""They see no more than the size of the last dim, of which halves have all."""


def columns() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(1))}


def built(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().train()


def functions_in(segment: Segment) -> list[fx.Node]:
    return [n for n in segment.graph.nodes if n.target is torch.ops.merak.autograd_function.default]


@pytest.mark.parametrize("sequence", [False, True])
@one_in(4)
@pytest.mark.parametrize("function", SAME_EVERY_TIME)
def test_two_ranks_give_what_one_gives(function: type[Function], sequence: bool) -> None:
    model = built(lambda: own.Layers(function))
    constant = function in (own.Filled, own.SizeInATensor, own.SizeInANewTensor)
    why = "it reads a tensor that no operator of it has made" if constant else ""
    assert assert_parity(model, columns(), None, 2, sequence=sequence, on_autograd=why)


@pytest.mark.parametrize("function", own.EVERYWHERE)
def test_what_sees_only_elements_runs_on_shards(function: type[Function]) -> None:
    graph = cases.traced(built(lambda: own.Layers(function)), columns())
    rewrite = tensor_parallel(graph, {"up": Column()}, 2)
    found = [n for s in graph.segments for n in functions_in(rewrite(s)[0])]
    assert [node.meta["tensor"][0].shape for node in found] == [(BATCH, 16)] * 3


@one_in(5)
@pytest.mark.parametrize("function", own.NOWHERE)
def test_what_sees_its_size_refuses_a_split_that_is_asked_for(function: type[Function]) -> None:
    graph = cases.traced(built(lambda: own.Layers(function)), columns())
    with pytest.raises(ShardError, match="with a backward of its own, which must see the whole"):
        tensor_parallel(graph, {"up": Column()}, 2)


@pytest.mark.parametrize("make", [own.EarlyReaders, own.QuantisedWeights])
@pytest.mark.parametrize("sequence", [False, True])
def test_a_backward_that_is_not_linear_gets_the_whole_gradient(
    make: type[nn.Module], sequence: bool
) -> None:
    assert_parity(built(make), columns(), None, 2, sequence=sequence)


def halved_gradients(
    segment: Segment, parameters: dict[str, torch.Tensor], values: dict[str, torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Gradients of a segment's parameters and inputs: whole, and in halves."""
    halves = split_segment(segment, SampleDims(BATCH))
    named = {**parameters, **values}
    names = (*segment.parameters, *segment.columns, *segment.inputs, *segment.batch_only)

    def run(one: Segment, given: dict[str, torch.Tensor], rows: slice) -> list[torch.Tensor]:
        results = cases.run_graph(one.graph, [given[name] for name in names])
        weights = torch.linspace(-1, 1, BATCH).view(-1, 1)[rows]
        made = zip(segment.outputs, results, strict=True)
        total: torch.Tensor = sum(
            ((weights if n in halves.dims else 1.0) * r).sum() for n, r in made
        )  # type: ignore[assignment]
        wanted = [t for t in given.values() if t.requires_grad]
        return list(torch.autograd.grad(total, wanted, allow_unused=True))

    whole = {n: t.detach().requires_grad_() for n, t in named.items()}
    expected = run(segment, whole, slice(None))
    parts = []
    for one, share in zip(halves.segments, halves.sub_microbatches, strict=True):
        rows = slice(share.start, share.stop)
        local = {
            n: (t[rows] if n in halves.dims else t).detach().requires_grad_()
            for n, t in named.items()
        }
        parts.append(dict(zip(named, run(one, local, rows), strict=True)))
    joined = [
        torch.cat([part[n] for part in parts]) if n in halves.dims else parts[0][n] + parts[1][n]
        for n in named
    ]
    return joined, expected


def halved(graph: ModelGraph, model: nn.Module) -> Iterator[bool]:
    """Whether segments with functions run in halves; gradients are compared where one does."""
    whole = cases.weights(model)
    values = columns()
    for segment in graph.segments[:-1]:
        own_values = {
            n: values[n] for n in (*segment.columns, *segment.inputs, *segment.batch_only)
        }
        own_weights = {n: whole[n] for n in segment.parameters}
        given = [*own_weights.values(), *own_values.values()]
        with torch.no_grad():
            results = cases.run_graph(segment.graph, given)
        try:
            found, expected = halved_gradients(segment, own_weights, own_values)
        except ShardError:
            runs = False
        else:
            runs = True
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        if functions_in(segment):
            yield runs
        values |= dict(zip(segment.outputs, results, strict=True))


@one_in(4)
@pytest.mark.parametrize("function", SAME_EVERY_TIME)
def test_sub_microbatches_give_what_the_microbatch_gives(function: type[Function]) -> None:
    model = built(lambda: own.Layers(function))
    graph = cases.traced(model, columns())
    runs = list(halved(graph, model))
    assert len(runs) > 1
    assert set(runs) == {function in (*own.EVERYWHERE, *OF_LAST_SIZE)}


def test_a_weights_function_needs_the_gradient_of_all_samples() -> None:
    model = built(own.QuantisedWeights)
    assert not any(halved(cases.traced(model, columns()), model))


# Operators of other libraries

_MINE = torch.library.Library("mine", "DEF")
_MINE.define("layer_norm(Tensor x) -> Tensor")
_MINE.define("silu(Tensor x) -> Tensor", tags=(torch.Tag.pointwise,))
_MINE.impl("layer_norm", lambda x: x - x.mean(-1, keepdim=True), "CompositeExplicitAutograd")
_MINE.impl("silu", lambda x: x * 2, "CompositeExplicitAutograd")


def _saved(ctx: Any, inputs: Any, output: Any) -> None:
    """Nothing is saved."""


def _centred(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    return gradient - gradient.mean(-1, keepdim=True)


def _clipped(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clamp(-0.01, 0.01) / gradient.size(0)


torch.library.register_fake("mine::layer_norm", torch.empty_like, lib=_MINE)
torch.library.register_fake("mine::silu", torch.empty_like, lib=_MINE)
torch.library.register_autograd("mine::layer_norm", _centred, setup_context=_saved, lib=_MINE)
torch.library.register_autograd("mine::silu", _clipped, setup_context=_saved, lib=_MINE)


class LibraryOperator:
    """In the place of an autograd function, an operator that is named like one of torch's."""

    def __init__(self, name: str) -> None:
        self.name = name

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = getattr(torch.ops.mine, self.name)(x)
        return made


@one_in(3)
@pytest.mark.parametrize("make", [own.Layers, own.EarlyReaders, own.QuantisedWeights])
@pytest.mark.parametrize("name", ["layer_norm", "silu"])
def test_operators_of_other_libraries_run_on_whole_tensors(
    make: Callable[[Any], nn.Module], name: str
) -> None:
    model = built(lambda: make(LibraryOperator(name)))
    assert_parity(model, columns(), None, 2)
    own_name = f"mine.{name}.default"
    for segment in cases.traced(model, columns()).segments:
        if any(str(node.target) == own_name for node in segment.graph.nodes):
            with pytest.raises(ShardError):
                split_segment(segment, SampleDims(BATCH))
