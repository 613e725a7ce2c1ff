"""Arguments that are no tensors and that no code of a model reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from merak.core.tensor_meta import TensorMeta
from merak.graph.segment.build import GraphSource
from merak.graph.segment.unread_arguments import unread_arguments
from tests.tiers import one_in

COLUMNS = {"x": TensorMeta((4, 8), torch.float32)}


class Layer(nn.Module):
    """Reads an argument as one of the functions below does, wherever it was passed to."""

    def __init__(self, read: Any) -> None:
        super().__init__()
        self.linear, self.read = nn.Linear(8, 8), read

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return self.linear(x) * self.read(self, x, kwargs.get("longest", 1))


class Model(nn.Module):
    def __init__(self, read: Any) -> None:
        super().__init__()
        self.layer = Layer(read)

    def forward(self, x: Tensor, longest: Any = None, **kwargs: Any) -> Tensor:
        if isinstance(longest, Tensor) or longest is None:
            longest = 1
        return self.layer(x, longest=longest, **kwargs).pow(2).mean()


def _caught(layer: Layer, x: Tensor, longest: Any) -> Any:
    try:
        return longest + 1
    except Exception:
        return 1


READS = {
    "in a product": lambda layer, x, longest: x * longest,
    "as a size": lambda layer, x, longest: x.new_ones(longest).mean(),
    "in a slice": lambda layer, x, longest: x[:, :longest].mean(),
    "in a range": lambda layer, x, longest: sum(range(longest)),
    "as a condition": lambda layer, x, longest: 2 if longest else 1,
    "compared": lambda layer, x, longest: 2 if longest > 2 else 1,
    "as a key": lambda layer, x, longest: {3: 2}.get(longest, 1),
    "in a text": lambda layer, x, longest: len(f"{longest}"),
    "inside of try": _caught,
    "in evaluation alone": lambda layer, x, longest: 1 if layer.training else longest,
}


@one_in(4)
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_an_argument_that_is_read(read: Any) -> None:
    source = GraphSource(Model(read), fixed={"longest": 3, "other": "a"})
    # Where an operator wants a number, the trace fails, which does not say of which argument.
    assert unread_arguments(source, COLUMNS) in ({"other"}, frozenset())


def test_arguments_that_are_passed_on_and_not_read() -> None:
    source = GraphSource(Model(lambda *_: 1), fixed={"longest": 3, "other": 0.5, "flag": True})
    assert unread_arguments(source, COLUMNS) == {"longest", "other"}
    assert source.fixed == {"longest": 3, "other": 0.5, "flag": True}


def test_a_loss_function_that_reads_one() -> None:
    def loss_fn(output: Tensor, batch: dict[str, Any]) -> Tensor:
        return output

    source = GraphSource(Model(READS["compared"]), loss_fn, fixed={"longest": 3})
    assert unread_arguments(source, COLUMNS) == frozenset()
