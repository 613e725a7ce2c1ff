"""Writes into parameters while a model runs: taken out of the graph, or refused with a sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from merak.core.errors import TraceError
from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import ModelGraph
from merak.graph.ir.mutation import is_mutating
from merak.graph.ir.serialize import pack_model, unpack_model
from merak.graph.program.codegen import runnable
from merak.graph.segment.build import GraphSource, build_graph
from tests.tiers import one_in

COLUMNS = {"x": TensorMeta((4, 6), torch.float32), "ids": TensorMeta((4, 3), torch.int64)}


class Writes(nn.Module):
    """Two layers and a table; what is given writes into them before anything is read."""

    def __init__(self, write: Callable[[Any], Any], table: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.write = write
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.table = nn.Embedding(9, 6, **(table or {}))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        self.x = x
        self.write(self)
        del self.x
        h = torch.tanh(self.a(x)) + self.table(ids).mean(1)
        return self.b(h).square().mean()


def norm_rows(own: Any) -> None:
    with torch.no_grad():
        own.a.weight.copy_(nn.functional.normalize(own.a.weight, dim=1))


def norm_data(own: Any) -> None:
    own.a.weight.data.div_(own.a.weight.data.norm(dim=1, keepdim=True).clamp_(min=1e-6))


def limit_rows(own: Any) -> None:
    own.a.weight.data[:2] = own.a.weight.data[:2].renorm(2, 0, 1.0)


def clip(own: Any) -> None:
    own.a.weight.data.clamp_(-0.1, 0.1)


def replace_rows(own: Any) -> None:
    own.a.weight.data = torch.renorm(own.a.weight.data, 2, 0, 1.0)


def read_normed(own: Any) -> None:
    weight = nn.functional.normalize(own.a.weight, dim=1)
    own.a.weight.data = weight
    own.x = own.x @ weight


def traced(model: nn.Module) -> ModelGraph:
    return build_graph(GraphSource(model), COLUMNS, training=True)


@one_in(3)
@pytest.mark.parametrize(
    "write", [norm_rows, norm_data, limit_rows, clip, replace_rows, read_normed]
)
def test_what_is_written_is_what_eager_code_writes(write: Callable[[Any], Any]) -> None:
    model = Writes(write)
    graph = unpack_model(pack_model(traced(model)))
    (one,) = graph.parameter_writes
    assert (one.parameter, one.elementwise) == ("a.weight", write is clip)
    assert not any(is_mutating(node) for s in graph.segments for node in s.graph.nodes)
    own = 3 * torch.randn(6, 6)
    with torch.no_grad():
        model.a.weight.copy_(own)
        runnable(one.graph)(own)
    model(torch.randn(4, 6), torch.zeros(4, 3, dtype=torch.int64))
    assert torch.equal(own, model.a.weight)


def test_rows_that_are_looked_up() -> None:
    model = Writes(lambda own: None, {"max_norm": 0.5})
    (one,) = traced(model).parameter_writes
    assert (one.parameter, one.columns, one.elementwise) == ("table.weight", ("ids",), False)
    own, ids = model.table.weight.detach().clone(), torch.tensor([[1, 2, 1]] * 4)
    runnable(one.graph)(own, ids)
    model(torch.randn(4, 6), ids)
    assert torch.equal(own, model.table.weight)
    assert not torch.equal(own[3], own[3] / own[3].norm() * 0.5)


def decay(own: Any) -> None:
    own.a.weight.data.mul_(0.999)


def follow(own: Any) -> None:
    own.a.weight.data.lerp_(own.b.weight.data, 0.1)


def count(own: Any) -> None:
    own.count += 1
    own.a.weight.data.clamp_(max=own.count)


def late(own: Any) -> None:
    own.count += own.a(own.x).mean().detach()
    clip(own)


def shifted(own: Any) -> None:
    own.a.weight.data.sub_(own.x.mean())


def noise(own: Any) -> None:
    own.a.weight.data.copy_(torch.rand(6, 6))


def told(own: Any) -> None:
    mean = own.a.weight.data.mean()
    own.a.weight.data.sub_(mean)
    own.count += mean


def grow(own: Any) -> None:
    own.a.weight.data = torch.zeros(6, 7)


def grow_data(own: Any) -> None:
    own.a.weight.data = own.a.weight.data.double()


@pytest.mark.parametrize("write", [grow, grow_data])
def test_data_of_another_kind(write: Callable[[Any], Any]) -> None:
    with pytest.raises(TraceError, match=r"assigns to the `\.data` of a tensor"):
        traced(Writes(write))


@one_in(3)
@pytest.mark.parametrize(
    ("write", "said"),
    [
        (decay, "writes something else every time"),
        (follow, "what it writes depends on the parameter b.weight"),
        (count, "what it writes depends on the buffer count"),
        (late, "reads it before the last write at"),
        (shifted, "what it writes depends on the batch"),
        (noise, "what it writes depends on random numbers"),
        (told, "is read on"),
    ],
)
def test_what_is_not_the_same_before_the_step_is_refused(
    write: Callable[[Any], Any], said: str
) -> None:
    with pytest.raises(TraceError, match=f"writes into the parameter a.weight.*{said}"):
        traced(Writes(write))


def test_a_table_whose_other_rows_are_read_is_refused() -> None:
    def read(own: Any) -> None:
        own.count += own.table.weight.mean().detach()

    with pytest.raises(
        TraceError, match=r"depends on the batch, and .* reads more than these rows"
    ):
        traced(Writes(read, {"max_norm": 0.5}))
