"""Whether an autograd function may run on a shard: only if it sees nothing of the size."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import Function

from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.custom_operators import pack_arguments
from merak.graph.trace.modes.size_invariance import is_size_invariant
from tests.tiers import one_in
from tests.unit.graph import own_backwards as own


def arguments(*args: object) -> str:
    packed = pack_arguments(args, {})
    assert packed is not None
    return packed[1]


def may_split(function: type[Function], *more: object, dim: int = 1) -> bool:
    """Of an operand of 4 x 32."""
    local = (2, 32) if dim == 0 else (4, 16)
    name = f"{function.__module__}:{function.__qualname__}"
    operand = TensorMeta((4, 32), torch.float32, requires_grad=True)
    return is_size_invariant((operand,), local, name, arguments(torch.zeros(()), *more))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("function", own.EVERYWHERE)
def test_what_sees_only_elements_is_split(function: type[Function], dim: int) -> None:
    assert may_split(function, dim=dim)


def test_arguments_that_are_numbers_are_the_same_everywhere() -> None:
    assert may_split(own.Reversed, 0.5)


@one_in(4)
@pytest.mark.parametrize("function", own.NOWHERE)
def test_what_sees_the_size_is_not_split(function: type[Function]) -> None:
    assert not may_split(function)


def test_what_sees_one_dim_is_split_along_others() -> None:
    assert may_split(own.LastSize, dim=0)
    assert may_split(own.FirstSize, dim=1)
    assert not may_split(own.FirstSize, dim=0)
    assert not may_split(own.SizeInBackward, dim=0)


def test_operands_of_several_shapes_are_not_split() -> None:
    metas = [TensorMeta(shape, torch.float32, requires_grad=True) for shape in ((4, 32), (32,))]
    name = f"{own.Passing.__module__}:Passing"
    assert not is_size_invariant(metas, (4, 16), name, arguments(torch.zeros(()), torch.zeros(())))


def test_the_models_tensors_are_not_changed_by_the_trial() -> None:
    before = own.COUNT.clone()
    assert not may_split(own.CountingInATensor)
    assert torch.equal(own.COUNT, before)


def test_a_function_that_is_defined_anew_is_tried_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    assert may_split(own.Passing)
    monkeypatch.setattr(own, "Passing", own.SizeInBackward)
    name = f"{own.__name__}:Passing"
    operand = TensorMeta((4, 32), torch.float32, requires_grad=True)
    assert not is_size_invariant((operand,), (4, 16), name, arguments(torch.zeros(())))
