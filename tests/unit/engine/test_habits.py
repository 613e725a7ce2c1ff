"""Habits of loops in PyTorch that what `merak.parallelize` makes does not have: what it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import merak
from merak.core.errors import MerakError, TraceError
from merak.parallel import _HABITS, ParallelModel

pytestmark = pytest.mark.usefixtures("one_rank")

BATCH = {"x": torch.ones(2, 4)}


class Net(nn.Module):
    """A linear layer and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().mean()


@pytest.fixture(scope="module")
def laid_out() -> list[ParallelModel]:
    return []


@pytest.fixture
def parallel(laid_out: list[ParallelModel]) -> ParallelModel:
    if not laid_out:
        laid_out.append(merak.parallelize(Net(), BATCH, optimizer=torch.optim.SGD))
    return laid_out[0]


@pytest.mark.parametrize("name", sorted(_HABITS))
def test_what_is_not_there_says_what_is(parallel: ParallelModel, name: str) -> None:
    if name == "__call__":
        with pytest.raises(TypeError, match=r"is not called; step\(batch\) runs") as refused:
            parallel(**BATCH)
    else:
        assert not hasattr(parallel, name)
        with pytest.raises(AttributeError) as refused:
            getattr(parallel, name)
    assert isinstance(refused.value, MerakError) and _HABITS[name] in str(refused.value)


def test_names_that_are_mistyped(parallel: ParallelModel) -> None:
    with pytest.raises(AttributeError, match="has no evalute; did you mean evaluate"):
        parallel.evalute  # noqa: B018
    with pytest.raises(AttributeError, match=r"makes has no of_no_use\.$"):
        parallel.of_no_use  # noqa: B018


def test_an_optimizer_beside_the_one_that_is_stepped(parallel: ParallelModel) -> None:
    own = torch.optim.SGD(parallel.model.parameters())
    with pytest.raises(MerakError, match=r"was given an optimizer, which step\(batch\) steps;"):
        parallel.connect_optimizer(own)


class Packed(torch.Tensor):
    """Weights of eight bits, which operators see as float32."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: float) -> Packed:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)

    def __init__(self, values: torch.Tensor, scale: float) -> None:
        self.values, self.scale = values, scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].values, args[0].scale)
        whole = [a.values.float() * a.scale if isinstance(a, Packed) else a for a in args]
        return func(*whole, **(kwargs or {}))


def test_quantised_weights_are_refused_with_the_way_out() -> None:
    model = Net()
    packed = Packed(torch.ones(4, 4, dtype=torch.int8), 0.5)
    model.linear.weight = nn.Parameter(packed, requires_grad=False)
    assert float(model(**BATCH).detach()) > 0
    with pytest.raises(
        TraceError,
        match=r"linear\.weight of Net is a Packed, a class of tensor with code of its own, .* load "
        "the model without quantization",
    ):
        merak.parallelize(model, BATCH, optimizer=torch.optim.SGD)


class Flat(nn.Module):
    """A loss of flattened columns, as scripts shift, transpose and flatten theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)

    def forward(self, ids: torch.Tensor, gold: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.table(ids)).flatten(0, 1), gold.contiguous().view(-1))


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_columns_that_are_slices_or_transposed_are_as_contiguous_ones(
    num_microbatches: int,
) -> None:
    """`gold.contiguous()` is not in the graph, which was traced with contiguous columns."""
    rows = torch.arange(24).view(6, 4).T % 9
    batch = {"ids": rows[:, :-1], "gold": rows[:, 1:]}
    model = Flat()
    expected = model(**batch)
    parallel = merak.parallelize(model, batch, num_microbatches=num_microbatches)
    assert parallel.step(batch).item() == pytest.approx(expected.item(), rel=1e-6)
    assert parallel.evaluate(batch).item() == pytest.approx(expected.item(), rel=1e-6)
