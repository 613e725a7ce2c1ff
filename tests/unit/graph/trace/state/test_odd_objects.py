"""Objects whose own code always fails, held by a model: they are not looked at."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from merak.core.tensor_meta import TensorMeta
from merak.graph.segment.build import GraphSource, build_graph
from tests.tiers import one_in


class NoAttributes:
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("asked for an attribute")


class NoSlots:
    __slots__ = ("value",)

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("asked for an attribute")


class NotCompared:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    def __hash__(self) -> int:
        raise RuntimeError("hashed")

    def __bool__(self) -> bool:
        raise RuntimeError("tested")

    def __repr__(self) -> str:
        raise RuntimeError("shown")


class NoItems(dict[str, int]):
    def __iter__(self) -> Any:
        raise RuntimeError("iterated")

    def __len__(self) -> int:
        raise RuntimeError("counted")


class NoClass:
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("asked for its attributes")

    @property
    def __class__(self) -> Any:
        raise RuntimeError("asked for its class")


class Plain:
    held: Any = None


GLOBAL: Any = None


class Model(nn.Module):
    def __init__(self, held: Mapping[str, Any]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        for place, one in held.items():
            setattr(self, place, one)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x.shape[0] if self.nested is not None and GLOBAL is not None else 0
        return self.down(self.up(x)).pow(2).mean()  # type: ignore[no-any-return]


def within(place: str, one: Any) -> Any:
    """An object inside of others, as models hold it."""
    if place == "nested":
        made = Plain()
        made.held = one
        return made
    return {"itself": one, "list": [one], "dict": {"x": one}, "tuple": (1, (one,))}[place]


PLACES = ("list", "dict", "tuple", "nested")


@one_in(5)
@pytest.mark.parametrize("kind", [NoAttributes, NoSlots, NotCompared, NoItems, NoClass])
def test_objects_whose_code_fails_are_not_looked_at(
    kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "GLOBAL", kind())
    # As an attribute of the model itself the others fail in torch, which asks for their class.
    places = (*PLACES, "itself") if kind in (NotCompared, NoItems) else PLACES
    model = Model({place: within(place, kind()) for place in places})
    source = GraphSource(model, cache_dir=tmp_path / "cache")
    for rows, training in ((4, True), (6, True), (6, False)):
        columns = {"x": TensorMeta((rows, 8), torch.float32)}
        graph = build_graph(source, columns, training=training)
        assert graph.parameters.keys() == dict(source.model.named_parameters()).keys()
    assert isinstance(source.model.up, nn.Linear)
