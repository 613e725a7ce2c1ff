"""Opaque modules that are measured on an example batch, since made-up values would not do."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import nn
from torch.nn import functional

from merak.graph.segment.build import GraphSource, build_graph, example_at
from merak.graph.trace.opaque.operator import opaque_calls
from tests.unit.graph.stages import assert_like_eager, metas


class Text(nn.Module):
    """Pads to the longest sample, which fits the batch alone, as of a model of speech."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)

    def forward(self, text: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        longest = int(lengths.max().item())
        text = functional.pad(text[:, :longest], (0, longest - text.shape[1]))
        return self.embed(text)


class Crops(nn.Module):
    """Checks its boxes, as detectors do, and pools what is in them."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, text: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        rows = []
        for length, row in zip(lengths.tolist(), functional.one_hot(text, 32)[..., :8]):
            if not 1 < length <= 6:
                raise ValueError(f"a box of the length {length}")
            rows.append(self.mix(row[: int(length)].float()).mean(0))
        return torch.stack(rows).unsqueeze(1)


class Speech(nn.Module):
    def __init__(self, text: nn.Module) -> None:
        super().__init__()
        self.text = text
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor, text: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        h = x + self.text(text, mask.sum(1))
        for block in self.blocks:
            h = h + block(h)
        return h


class Outer(nn.Module):
    def __init__(self, text: nn.Module) -> None:
        super().__init__()
        self.inner = Speech(text)

    def forward(self, x: torch.Tensor, text: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (self.inner(x, text, mask) - 1).pow(2).mean()
        return loss


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(2, 6, 8, generator=generator),
        "text": torch.randint(32, (2, 6), generator=generator),
        "mask": torch.arange(6) < torch.tensor([[6], [4]]),
    }


def source_of(kind: type[nn.Module], example: Mapping[str, torch.Tensor]) -> GraphSource:
    torch.manual_seed(0)
    return GraphSource(Outer(kind()), example=example)


@pytest.mark.parametrize("kind", [Text, Crops])
def test_the_smallest_module_is_opaque_that_takes_the_example(kind: type[nn.Module]) -> None:
    source = source_of(kind, batch())
    graph = build_graph(source, metas(batch()), training=True)
    assert list(source.opaque.modules) == ["inner.text"]
    assert len(graph.segments) > 4
    (call,) = opaque_calls(graph)
    assert (call.cost.flops > 0) == (kind is Crops)
    assert_like_eager(graph, source.model, batch())


def test_without_an_example_the_module_around_it_is() -> None:
    source = source_of(Text, {})
    build_graph(source, metas(batch()), training=True)
    assert list(source.opaque.modules) == ["inner"]


def test_an_example_at_another_shape_is_cut_or_repeated() -> None:
    smaller = {
        name: column[:1].repeat(3, *(1,) * (column.ndim - 1)) for name, column in batch().items()
    }
    found = example_at(batch(), metas(smaller))
    assert torch.equal(found["mask"], batch()["mask"][[0, 1, 0]])
    assert example_at({"x": torch.zeros(2)}, metas(batch())) == {}
