"""Opaque modules whose results share storages, or that hold state between their calls."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
from torch import nn

from merak.core.errors import TraceError, TrainingError
from merak.core.tensor_meta import TensorMeta
from merak.graph.segment.build import GraphSource, build_graph
from tests.tiers import one_in
from tests.unit.graph.stages import Pipeline, assert_like_eager

COLUMNS = {"x": TensorMeta((6, 8), torch.float32)}


class Passes(nn.Module):
    """Looks at numbers, and returns its argument, or a view of it."""

    def __init__(self, view: bool = False) -> None:
        super().__init__()
        self.view = view

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.max() > 100:
            x = x / 2
        return x.view(-1) if self.view else x


class Model(nn.Module):
    """A part between two layers."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(8, 8), part, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.last(self.part(self.first(x))).square().mean()}


class WritesResult(nn.Module):
    """Writes into what a kept module returned, and reads what that was called with."""

    def __init__(self, view: bool = False) -> None:
        super().__init__()
        self.passes = Passes(view)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.passes(x * 1.0)
        y *= 3.0
        return x * y.view_as(x)


class WritesArgument(nn.Module):
    """Writes into what a kept module was called with, and reads what it returned."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = Passes(view=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * 1.0
        y = self.passes(h)
        h += 1.0
        return y.view_as(x) * x


class Adds(nn.Module):
    """Adds into its first argument, by its numbers, and returns a product with the second."""

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        x += 1.0 if x.max() > 0 else 2.0
        return x * other


class Overlaps(nn.Module):
    """Calls a module that writes into its argument with two views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.adds = Adds()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * 1.0
        return self.adds(h, h.view(8, 6).view(6, 8))


@one_in(2)
@pytest.mark.parametrize(
    "part", [WritesResult(), WritesResult(view=True), WritesArgument(), Overlaps()]
)
def test_a_write_into_shared_memory_makes_the_module_around_it_whole(part: nn.Module) -> None:
    torch.manual_seed(0)
    source = GraphSource(model := Model(part))
    assert_like_eager(build_graph(source, COLUMNS, training=True), model, {"x": torch.randn(6, 8)})
    assert list(source.opaque.modules) == ["part"]


class WritesOutside(nn.Module):
    """The same write in the model's own forward, around which there is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.passes = nn.Linear(8, 8), Passes()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.first(x)
        y = self.passes(h)
        y += 1.0
        return {"loss": (h * y).mean()}


class SetsAttribute(nn.Module):
    """Tells a module what to do by an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.part = nn.Linear(8, 8), Told()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.part.factor = 5.0
        return {"loss": self.part(self.first(x)).mean()}


class Told(nn.Module):
    """Multiplies with what it has been told."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor if x.max() > 0 else x


class Remembers(nn.Module):
    """Keeps a tensor in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.max() > 0:
            x = x * 2
        self.seen.append(x.detach())
        return x


class Counts(nn.Module):
    """Does something else in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls if x.max() > 0 else x + self.calls


class Draws(nn.Module):
    """Draws with Python's generator."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + random.random()) if x.max() > 0 else x


class GrowsBuffer(nn.Module):
    """Registers a buffer when it is called first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "top"):
            self.register_buffer("top", x.detach().max())
        return x * 2 if x.max() > self.top else x


@one_in(3)
@pytest.mark.parametrize(
    ("model", "said"),
    [
        (WritesOutside(), "passes cannot be opaque: it returns a tensor that shares memory"),
        (SetsAttribute(), "its attribute factor is set by code around it"),
        (Model(Remembers()), "it keeps a tensor in its attribute seen"),
        (Model(Counts()), "called twice alike it returns two things"),
        (Model(Draws()), "it draws random numbers with Python's or NumPy's generator"),
        (Model(GrowsBuffer()), "it keeps a tensor in the new buffer top"),
    ],
)
def test_what_could_not_be_right_is_refused(model: nn.Module, said: str) -> None:
    with pytest.raises(TraceError, match=re.escape(said)) as caught:
        build_graph(GraphSource(model), COLUMNS, training=True)
    assert "\n" not in str(caught.value)
    assert "cannot be traced at" in str(caught.value)  # what was in the way at first


class Turns(nn.Module):
    """What it does for large numbers is seen when it runs, and not when it is traced."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self.act = act
        self.register_buffer("top", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self, x) if x.max() > 1000 else x * 2


def _writes(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    module.top += 1
    return x * 2


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (_writes, "writes into part.top for these values of the batch"),
        (lambda module, x: x[:3] * 2, "returns torch.float32 of (3, 8) for these values"),
    ],
)
def test_what_was_not_seen_in_the_trace_is_refused_when_it_runs(act: Any, said: str) -> None:
    model = Model(Turns(act))
    graph = build_graph(GraphSource(model), COLUMNS, training=True)
    Pipeline(graph, model).train({"x": torch.randn(6, 8)})
    with pytest.raises(TrainingError, match=re.escape(said)):
        Pipeline(graph, model).train({"x": 1e6 * torch.ones(6, 8)})


class WritesFresh(nn.Module):
    """Writes into the result of a kept module that is a view for large numbers alone."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = Turns(lambda module, x: x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * 1.0
        y = self.turns(h)
        y += 1.0
        return y * h


def test_a_result_may_be_written_into_unless_it_turns_out_to_share_memory() -> None:
    torch.manual_seed(0)
    source = GraphSource(model := Model(WritesFresh()))
    graph = build_graph(source, COLUMNS, training=True)
    assert list(source.opaque.modules) == ["part.turns"]
    assert_like_eager(graph, model, {"x": torch.randn(6, 8)})
    with pytest.raises(TrainingError, match="shares memory with something that is written into"):
        Pipeline(graph, model).train({"x": 1e6 * torch.ones(6, 8)})
