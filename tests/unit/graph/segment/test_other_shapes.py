"""Tables that grow with the longest batch: followed where no batch's numbers depend on others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from merak.core.errors import TraceError
from merak.core.tensor_meta import TensorMeta
from merak.graph.segment.build import GraphSource
from merak.graph.segment.dynamic_shapes import GraphsByShape
from tests.tiers import one_in, slow

WIDTH, KNOWN = 4, 6


def angles(length: int, scale: float = 1.0) -> Tensor:
    speed = (100.0 * scale) ** -(torch.arange(WIDTH) / WIDTH)
    return torch.outer(torch.arange(float(length)), speed)


def scaled(length: int) -> Tensor:
    return angles(length, max(1.0, 2.0 * length / KNOWN - 1) ** 2)


def padded(length: int) -> Tensor:
    table = angles(length).cos()
    table[0, :] = 0
    return table


def last_first(length: int) -> Tensor:
    return angles(length).flip(0)


class Rows(nn.Module):
    """A buffer that is made anew for a longer batch, judged by a number beside it or its shape."""

    def __init__(self, make: Callable[[int], Tensor], by: str, known: int = KNOWN) -> None:
        super().__init__()
        self.make, self.by, self.known = make, by, known
        self.register_buffer("table", make(known), persistent=False)

    def forward(self, length: int) -> Tensor:
        if length > (self.known if self.by == "number" else self.table.shape[0]):
            self.known = length
            self.register_buffer("table", self.make(length), persistent=False)
        return self.table[:length]


class Plain(nn.Module):
    """A plain tensor, moved to its device in every forward, and made anew for a longer batch."""

    def __init__(self, make: Callable[[int], Tensor], known: int = KNOWN) -> None:
        super().__init__()
        self.make, self.table = make, make(known)

    def forward(self, length: int) -> Tensor:
        self.table = self.table.to("cpu")
        if length > self.table.shape[0]:
            self.table = self.make(length)
        return self.table[:length]


class ForEach(Plain):
    """A table for exactly this length."""

    def forward(self, length: int) -> Tensor:
        self.table = self.table.to("cpu")
        if length != self.table.shape[0]:
            self.table = self.make(length)
        return self.table


class ByLength(nn.Module):
    """Tables in a dict, by length."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, Tensor] = {}

    def forward(self, length: int) -> Tensor:
        if length not in self.tables:
            self.tables[length] = scaled(length)
        return self.tables[length]


class Model(nn.Module):
    """A layer over rows of a table, with running statistics beside."""

    def __init__(self, rows: Any) -> None:
        super().__init__()
        self.rows = rows
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        table: Tensor = self.rows(x.shape[1])
        return self.norm(self.layer(x * table).flatten(0, 1)).square().mean()


def trace(rows: Any, lengths: tuple[int, ...], training: bool = True) -> None:
    graphs = GraphsByShape(GraphSource(Model(rows)), training=training)
    for length in lengths:
        graphs({"x": TensorMeta((2, length, WIDTH), torch.float32)})


@pytest.mark.parametrize("lengths", [(4, 9), slow((9, 4)), slow((9, 8))])
@one_in(3)
@pytest.mark.parametrize(
    "rows",
    [
        lambda: Rows(angles, "number"),
        lambda: Rows(padded, "shape"),
        lambda: Plain(padded),
        lambda: ForEach(scaled),
        lambda: ForEach(last_first),
        ByLength,
    ],
)
def test_a_table_that_serves_every_batch(
    rows: Callable[[], nn.Module], lengths: tuple[int, ...]
) -> None:
    trace(rows(), lengths)
    trace(rows(), lengths, training=False)


@pytest.mark.parametrize("lengths", [(4, 9), (9, 4), slow((9, 8))])
@one_in(2)
@pytest.mark.parametrize(
    "rows",
    [
        lambda: Rows(scaled, "number"),
        lambda: Rows(scaled, "shape"),
        lambda: Rows(last_first, "shape"),
        lambda: Plain(scaled),
    ],
)
def test_a_table_whose_rows_depend_on_earlier_batches_is_refused(
    rows: Callable[[], nn.Module], lengths: tuple[int, ...]
) -> None:
    with pytest.raises(TraceError, match=r"forward keeps .*rows\.table.* depend on the order of"):
        trace(rows(), lengths)


def test_one_shape_alone_needs_no_other() -> None:
    trace(Rows(scaled, "number"), (9, 9))
