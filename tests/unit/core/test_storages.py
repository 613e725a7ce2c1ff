"""Bytes of tensors, and what stays possible with the tensors."""

from __future__ import annotations

import pytest
import torch

from merak.core.storages import memory_of, num_bytes


@pytest.mark.parametrize("shape", [(), (0,), (3, 2)])
def test_the_bytes_of_a_tensor_leave_it_resizable(shape: tuple[int, ...]) -> None:
    tensor = torch.rand(shape).bfloat16()
    expected = tensor.clone().view(torch.int16).numpy().tobytes()
    assert bytes(memory_of(tensor)) == expected
    assert tensor.resize_(5, 7).shape == (5, 7)


def test_bytes_of_a_sparse_tensor_are_those_of_its_values_and_indices() -> None:
    assert num_bytes(torch.ones(2, 3)) == 24
    assert num_bytes(torch.eye(3).to_sparse()) == 3 * (4 + 2 * 8)
