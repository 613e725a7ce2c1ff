"""Choices that hang on the batch alone, in the model's own forward: traced both ways."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from merak.core.errors import TraceError
from merak.graph.segment.build import GraphSource, build_graph
from merak.graph.trace.opaque.operator import opaque_calls
from tests.tiers import one_in
from tests.unit.graph.stages import Pipeline, assert_like_eager, built, metas


class Attention(nn.Module):
    """Attends to what a mask, if there is one, leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        query, key, value = self.mix(x).chunk(3, -1)
        scores = query @ key.transpose(1, 2)
        if mask is not None:
            scores = scores.masked_fill(mask[:, None, :], -1e9)
        return x + self.out(scores.softmax(-1) @ value)


class Padded(nn.Module):
    """Makes no mask where the batch has no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(Attention() for _ in range(3))
        self.head = nn.Linear(8, 11)

    def padding(self, x: torch.Tensor) -> torch.Tensor | None:
        mask = x.eq(0)
        return mask if mask.any() else None

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mask, h = self.padding(x), self.embed(x)
        for layer in self.layers:
            h = layer(h, mask)
        return functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


class Item(Padded):
    """Asks with a Python number."""

    def padding(self, x: torch.Tensor) -> torch.Tensor | None:
        mask = x.eq(0)
        has_padding = mask.any().item()
        return mask if has_padding else None


class Written(Padded):
    """Writes its mask in place, through a view."""

    def padding(self, x: torch.Tensor) -> torch.Tensor | None:
        mask = torch.zeros_like(x, dtype=torch.bool)
        rows = mask.view(-1)
        rows.masked_fill_(x.eq(0).view(-1), True)
        return mask if rows.any() else None


class InOneLoop(Padded):
    """Reads its mask in a line that runs for each layer, beside what it computes without one."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(self.encoded(x)).flatten(0, 1), y.flatten())

    def encoded(self, x: torch.Tensor) -> torch.Tensor:
        mask, h = self.padding(x), self.embed(x)
        for layer in self.layers:
            h = h + layer(h, None)
            if mask is not None:
                h = h.masked_fill(mask.unsqueeze(-1), 0)
        return h


class OneLevelDown(nn.Module):
    """An encoder that makes no mask, with a head around it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.encoder(x).flatten(0, 1), y.flatten())


class Encoder(InOneLoop):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.head(self.encoded(x))  # type: ignore[no-any-return]


class LongTexts(Padded):
    """Runs its last layer for some batches alone."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for layer in self.layers[:2]:
            h = layer(h, None)
        if (x > 8).any():
            h = self.layers[2](h, None)
        return functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def batch_of(low: int, high: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(high)
    x, y = (torch.randint(low, high, (4, 6), generator=generator) for _ in range(2))
    return {"x": x, "y": y}


@one_in(3)
@pytest.mark.parametrize("kind", [Padded, Item, Written, InOneLoop, OneLevelDown, LongTexts])
def test_either_way_is_that_of_eager_code(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind()
    graph = built(model, batch_of(0, 11))
    assert len(graph.segments) > 4 and not opaque_calls(graph)
    for batch in (batch_of(0, 11), batch_of(1, 8)):  # the second one takes the other way
        assert_like_eager(graph, model, batch)


class Inside(nn.Module):
    """The choice of a module that is a small part of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.part = Part()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.part(self.embed(x), x)
        return functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return h * self.scale if (x > 8).any() else h * 2


class Computes(Padded):
    """Computes another thing in the place of one, which leaves nothing out."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        h = torch.tanh(h) * 2 if (x > 8).any() else h.square()
        return functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def test_a_small_part_is_opaque_instead() -> None:
    source = GraphSource(Inside())
    build_graph(source, metas(batch_of(0, 11)), training=True)
    assert list(source.opaque.modules) == ["part"] and not source.opaque.by_batch


def test_what_leaves_nothing_out_is_refused_with_its_line() -> None:
    with pytest.raises(TraceError, match=r"cannot be traced at .*test_batch_choices.*x > 8"):
        built(Computes(), batch_of(0, 11))


def test_the_way_is_remembered_for_other_shapes_and_evaluation() -> None:
    source = GraphSource(Padded())
    build_graph(source, metas(batch_of(0, 11)), training=True)
    assert source.opaque.by_batch
    smaller = {name: column[:3] for name, column in batch_of(0, 11).items()}
    graph = build_graph(source, metas(smaller), training=False)
    found = Pipeline(graph, source.model).evaluate(smaller)
    torch.testing.assert_close(found["loss"], source.model.eval()(**smaller))
