"""Operators that run otherwise than the trace has them.

Draws in logical order have one pattern for every memory format, torch's own where contiguous. Of
how many elements a write where a mask is true is, the batch alone says.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.torch_compiler import Compilation, TorchCompiler
from merak.graph.program.codegen import runnable
from tests.unit.graph.joint_parity import assert_bits_of_autograd
from tests.unit.graph.stages import built

FORMATS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.mT.contiguous().mT,
    "permuted": lambda x: x.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0),
    "expanded": lambda x: x[:, :1].expand(x.shape),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "sliced": lambda x: torch.cat((x, x), 1)[:, ::2],
    "contiguous": lambda x: x,
}
DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: functional.dropout(x, 0.5),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "alpha_dropout": lambda x: functional.alpha_dropout(x, 0.5, True),
    "bernoulli": lambda x: torch.bernoulli(torch.sigmoid(x)),
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn_like": lambda x: x + torch.randn_like(x),
    "filled": lambda x: x * torch.empty_like(x).bernoulli_(0.5),
    "in place": lambda x: functional.dropout(x * 1, 0.5, inplace=True),
    "rrelu": lambda x: torch.rrelu(x, training=True),
}


def graph_of(draw: Callable[[Tensor], Tensor], x: Tensor) -> fx.Graph:
    """The operators of a function, with the metadata that a trace gives them."""

    class Draws(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return draw(x)

    graph = torch.export.export(Draws(), (x,), strict=False).graph
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            node.meta["tensor"] = TensorMeta(tuple(value.shape), value.dtype)
    return graph


def run(draw: Callable[[Tensor], Tensor], x: Tensor, how: Compilation | None) -> Tensor:
    function = runnable(graph_of(draw, x), compiler=how and TorchCompiler(how))
    torch.manual_seed(5)
    return function(x)[-1]


@pytest.mark.parametrize("how", [None, Compilation("eager")], ids=["plain", "compiled"])
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("kind", FORMATS)
def test_a_pattern_is_that_of_a_contiguous_operand(
    kind: str, draw: str, how: Compilation | None
) -> None:
    strided = FORMATS[kind](torch.randn(3, 4, 5, 6))
    assert strided.is_contiguous() is (kind == "contiguous")
    found = run(DRAWS[draw], strided, how)
    torch.manual_seed(5)
    expected = DRAWS[draw](strided.contiguous())
    assert torch.equal(found, expected)


def test_gradients_pass_the_mask() -> None:
    x = torch.randn(3, 4, 5, 6).permute(3, 0, 2, 1).requires_grad_()
    found = run(DRAWS["dropout"], x, None)
    found.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad != 0, found != 0)


class Masked(nn.Module):
    """Frames that a mask selects become a learned one, and further ones zero."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.learned, self.wide = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(1, 8))

    def forward(self, x: torch.Tensor, mask: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        h[mask] = self.learned
        h[mask.roll(1, 1)] = self.wide.tanh()
        h[:, :2][~mask[:, :2]] = 0.0
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        return (h.sum(-1) - y).square().mean()


def batch(seed: int) -> dict[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(seed)
    mask = torch.rand(3, 6, generator=draws) > 0.6
    x, y = torch.randn(3, 6, 4, generator=draws), torch.randn(3, 6, generator=draws)
    return {"x": x, "mask": mask, "y": y}


def test_backwards_are_graphs_for_any_number_of_elements() -> None:
    model = Masked()
    graph = built(model, batch(0))
    numbers = set()
    for seed in range(3):
        given = batch(seed)
        numbers.add(int(given["mask"].sum()))
        for segment in graph.segments:
            assert_bits_of_autograd(graph, model, segment, given)
    assert len(numbers) > 1
