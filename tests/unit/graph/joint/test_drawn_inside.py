"""Joint graphs of attention whose kernel draws its dropout, each rank's by its position (GPUs).

A generator of the CPU stands in for that of a GPU, whose draws are counted.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional

from merak.core.mesh import Mesh, pretended
from merak.core.random import seed_for
from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import Kind
from merak.graph.joint.generate import run as run_part
from merak.graph.joint.segment import Functions, joint_segment
from merak.ops import sharded_dropout
from merak.ops.sharded_dropout import attend_sharded

HEADS = (2, 2, 5, 4)
"""Samples, heads of a rank, tokens, features."""


class Counted:
    """The CPU's generator as one of a GPU, where an offset says how much a seed has drawn."""

    def __init__(self) -> None:
        self.seed = self.offset = 0
        self._known = torch.get_rng_state()

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        if not torch.equal(torch.get_rng_state(), self._known):
            self.offset += 4
            self._known = torch.get_rng_state()
        return self.offset

    def manual_seed(self, seed: int) -> None:
        self.seed, self.offset = seed, 0
        self._restart()

    def set_offset(self, offset: int) -> None:
        self.offset = offset
        self._restart()

    def _restart(self) -> None:
        torch.manual_seed(seed_for(self.seed, self.offset))
        self._known = torch.get_rng_state()


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> Counted:
    made = Counted()
    monkeypatch.setattr(sharded_dropout, "_draws_inside", lambda device: True)
    monkeypatch.setattr(sharded_dropout, "_generator", lambda device: made)
    return made


def attended(weight: Tensor, x: Tensor) -> Tensor:
    """A dropout before attention and one behind it, whose numbers are every rank's."""
    query = functional.dropout(x * weight, 0.3)
    made = attend_sharded(
        query, x, x * 2, None, 0.4, True,
        scale=None, enable_gqa=False, layout=(1, (4,), "tp", 1),
    )  # fmt: skip
    return functional.dropout(made * weight, 0.3)


def graph_of() -> fx.Graph:
    graph = fx.Graph()
    weight, x = graph.placeholder("weight"), graph.placeholder("x")
    for node, shape, kind in ((weight, HEADS[-1:], Kind.PARAMETER), (x, HEADS, Kind.VALUE)):
        meta = TensorMeta(shape, torch.float32, True)
        node.meta |= {"kind": kind, "name": node.name, "tensor": meta}
    aten = torch.ops.aten
    scaled = graph.call_function(aten.mul.Tensor, (x, weight))
    query = graph.call_function(aten.dropout.default, (scaled, 0.3, True))
    value = graph.call_function(aten.mul.Tensor, (x, 2))
    options = {"scale": None, "enable_gqa": False, "layout": (1, (4,), "tp", 1)}
    made = graph.call_function(attend_sharded, (query, x, value, None, 0.4, True), options)
    scaled = graph.call_function(aten.mul.Tensor, (made, weight))
    graph.output((graph.call_function(aten.dropout.default, (scaled, 0.3, True)),))
    return graph


def mesh(rank: int) -> Mesh:
    return Mesh(1, 2, 1, rank, torch.device("cpu"), None)


def leaves() -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(s, generator=draw).requires_grad_() for s in (HEADS[-1:], HEADS)]


def saving(parts: Functions, given: list[Tensor], begin: Callable[[], None]) -> tuple[Tensor, ...]:
    return run_part(parts.forward, list(given))


def recomputing(
    parts: Functions, given: list[Tensor], begin: Callable[[], None]
) -> tuple[Tensor, ...]:
    output, *kept = run_part(parts.plain, list(given))
    begin()
    return (output, *run_part(parts.recompute, [*given, *kept]))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "run,keeps",
    [(saving, ()), (recomputing, ()), (recomputing, ("attend_sharded",))],
    ids=["saved", "recomputed", "attention kept"],
)
def test_bits_are_those_of_autograd(
    run: Callable[..., tuple[Tensor, ...]], keeps: tuple[str, ...], rank: int, generator: Counted
) -> None:
    tangent = torch.randn(HEADS)
    weight, x = leaves()
    with pretended(mesh(rank)):
        generator.manual_seed(5)
        expected = attended(weight, x)
        behind = torch.rand(3)
        torch.autograd.backward(expected, tangent)

        graph = graph_of()
        joint = joint_segment(graph, graph, keeps=keeps)
        assert joint is not None
        own, y = leaves()
        given = [own.detach(), y.detach()]
        parts = joint.parts(given)
        assert parts is not None, joint.obstacle
        generator.manual_seed(5)
        output, *saved = run(parts, given, lambda: generator.manual_seed(5))
        assert torch.equal(output, expected)
        read = [given[number] for number in parts.reads]
        parameters = [own for _ in parts.parameters]
        (gradient,) = run_part(parts.backward, [*read, tangent, *saved, *parameters])
        generator.manual_seed(5)
        run_part(parts.forward, list(given))
        assert torch.equal(torch.rand(3), behind)
    assert x.grad is not None
    assert torch.equal(gradient, x.grad)
    assert own.grad is not None
    assert weight.grad is not None
    assert torch.equal(own.grad, weight.grad)


def test_ranks_draw_apart_and_go_on_together(generator: Counted) -> None:
    found = []
    for rank in range(2):
        with pretended(mesh(rank)), torch.no_grad():
            generator.manual_seed(5)
            _, x = leaves()
            made = attend_sharded(
                x, x, x, None, 0.4, True,
                scale=None, enable_gqa=False, layout=(1, (4,), "tp", 1),
            )  # fmt: skip
            found.append((made, torch.rand(3)))
    assert not torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
