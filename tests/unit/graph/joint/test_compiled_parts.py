"""Parts that a compiler is given: what they save, and whose memory they give."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from merak.graph.ir.structure import structure_of_graph
from merak.graph.joint.generate import run
from merak.graph.joint.segment import JointSegment
from tests.unit.graph.joint.test_joint import Case, _autograd, _graph, _joint, _leaves, _tensors


class Sharing:
    """A compiler whose functions give one tensor for equal results, as compilers do."""

    def __init__(self, name: str) -> None:
        self.how = name
        self.targets: list[list[Any]] = []

    def compile(self, module: fx.GraphModule, layouts: Hashable = None) -> Callable[..., Any]:
        own = [node.target for node in module.graph.nodes if node.op == "call_function"]
        self.targets.append(own)

        def call(*args: Tensor) -> tuple[Tensor, ...]:
            made: list[Tensor] = []
            for result in module(*args):
                known = (o for o in made if o.shape == result.shape and torch.equal(o, result))
                made.append(next(known, result))
            return tuple(made)

        return call


def _compiled(case: Case, compiler: Sharing) -> JointSegment:
    graph = _graph(case)
    return JointSegment(graph, structure_of_graph(graph), compiler=compiler)


def _gated(up: Tensor, gate: Tensor, down: Tensor, x: Tensor) -> Tensor:
    return (F.silu(x @ gate) * (x @ up)) @ down


def test_elementwise_chains_are_computed_again() -> None:
    case = Case(_gated, [(6, 24), (6, 24), (24, 6)], [(4, 6)])
    compiler = Sharing("gated")
    parts = _compiled(case, compiler).parts(_tensors(case, 0))
    assert parts is not None
    ours, theirs = _leaves(case), _leaves(case)
    saved = run(parts.forward, [t.detach() for t in ours])[len(parts.carries) :]
    # The products before the activation; not the activation, nor what it is multiplied to.
    assert [tuple(value.shape) for value in saved] == [(4, 24), (4, 24)]
    tangents = [torch.randn(4, 6)]
    _, gradients = _joint(parts, ours, tangents)
    _, wanted = _autograd(case, theirs, tangents)
    for mine, one in zip([p.grad for p in ours[:3]], [p.grad for p in theirs[:3]], strict=True):
        assert mine is not None and one is not None
        torch.testing.assert_close(mine, one)
    torch.testing.assert_close(gradients[3], wanted[0])
    assert any(torch.ops.aten.silu_backward.default in own for own in compiler.targets)


def test_gradients_that_a_compiler_gives_once_are_two_tensors() -> None:
    case = Case(lambda a, b, w, x: torch.tanh(x @ w) + a + b, [(6,), (6,), (8, 6)], [(4, 8)])
    parts = _compiled(case, Sharing("sums")).parts(_tensors(case, 0))
    assert parts is not None
    ours = _leaves(case)
    _joint(parts, ours, [torch.randn(4, 6)])
    first, second = (p.grad for p in ours[:2])
    assert first is not None and second is not None
    assert torch.equal(first, second)
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()


def test_equal_fills_that_are_written_are_two_tensors() -> None:
    """A compiler that gives one tensor for both would let either write into the other."""

    def filled(w: Tensor, x: Tensor) -> Tensor:
        first, second = torch.zeros_like(x), torch.zeros_like(x)
        first[:, :3] += x.detach()[:, :3]
        second[:, 3:] += x.detach()[:, 3:]
        return torch.tanh(x) * w + first * 2.0 + second

    case = Case(filled, [(6,)], [(4, 6)])
    parts = _compiled(case, Sharing("fills")).parts(_tensors(case, 0))
    assert parts is not None
    ours, theirs = _leaves(case), _leaves(case)
    tangents = [torch.randn(4, 6)]
    made, gradients = _joint(parts, ours, tangents)
    expected, wanted = _autograd(case, theirs, tangents)
    assert torch.equal(made[0], expected[0])
    assert gradients[1] is not None and wanted[0] is not None
    assert torch.equal(gradients[1], wanted[0])


def test_what_mutates_or_draws_is_not_compiled() -> None:
    def dropped(w: Tensor, x: Tensor) -> Tensor:
        hidden = F.dropout(torch.tanh(x @ w) * 2.0, 0.5) + 1.0
        return hidden.mul_(3.0)

    compiler = Sharing("dropped")
    parts = _compiled(Case(dropped, [(8, 6)], [(4, 8)]), compiler)
    assert parts.parts(_tensors(Case(dropped, [(8, 6)], [(4, 8)]), 0)) is not None
    names = {str(target) for own in compiler.targets for target in own}
    assert "aten.mm.default" in names
    assert not any(name.split(".")[1] in ("bernoulli_", "mul_", "div_") for name in names)
