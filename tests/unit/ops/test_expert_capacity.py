"""Rows of experts in places of a fixed number, on one rank."""

from __future__ import annotations

import pytest
import torch

from merak.ops.expert_capacity import expert_capacity, from_places, to_places, value_of_each_place


@pytest.mark.parametrize(
    ("num_rows", "num_experts", "factor", "expected"),
    [(32, 4, 1.0, 8), (32, 4, 1.25, 10), (30, 4, 1.0, 8), (32, 4, 9.0, 32), (0, 4, 1.0, 0)],
)
def test_capacity(num_rows: int, num_experts: int, factor: float, expected: int) -> None:
    assert expert_capacity(num_rows, num_experts, factor) == expected


def test_first_rows_have_places_and_the_others_are_dropped() -> None:
    rows = torch.arange(1.0, 8).view(7, 1).requires_grad_()
    offsets = torch.tensor([3, 3, 5], dtype=torch.int32)  # rows of 0, 0, 0, 2, 2; two of no expert
    how = (offsets, 2, 7, 1, "ep")
    places = to_places(rows, *how)
    assert places.flatten().tolist() == [1, 2, 0, 0, 4, 5]
    back = from_places(places * 10, *how)
    assert back.flatten().tolist() == [10, 20, 0, 40, 50, 0, 0]
    back.sum().backward()
    assert rows.grad is not None
    assert rows.grad.flatten().tolist() == [10, 10, 0, 10, 10, 0, 0]


def test_values_of_places_add_up_their_gradients() -> None:
    values = torch.tensor([[1.0], [2.0]], requires_grad=True)
    every = value_of_each_place(values, 3)
    assert every.flatten().tolist() == [1, 1, 1, 2, 2, 2]
    (every * torch.arange(6.0).view(6, 1)).sum().backward()
    assert values.grad is not None
    assert values.grad.flatten().tolist() == [3, 12]
