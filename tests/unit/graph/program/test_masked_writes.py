"""Values that are written where a mask is true: of how many elements, only the batch says."""

from __future__ import annotations

import torch
from torch import nn

from tests.unit.graph.joint_parity import assert_bits_of_autograd
from tests.unit.graph.stages import built


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
