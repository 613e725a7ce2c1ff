"""Digests of parameters: any bit that differs shows, whatever memory a copy is in."""

from __future__ import annotations

import pytest
import torch

from merak.engine.step.replica_check import _folded, _sentence, _sum_of_bits

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.uint8)


def digest(tensor: torch.Tensor) -> int:
    return _folded(int(_sum_of_bits(tensor)))


def random(dtype: torch.dtype, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (size * dtype.itemsize,), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 3, 8])
def test_every_bit_counts(dtype: torch.dtype, size: int) -> None:
    raw = random(dtype, size)
    right = digest(raw.view(dtype))
    for byte in range(raw.numel()):
        for bit in range(8):
            other = raw.clone()
            other[byte] ^= 1 << bit
            wrong = digest(other.view(dtype))
            assert wrong != right
            assert 0 <= wrong < 2**62


def test_a_copy_in_other_memory_has_the_same_digest() -> None:
    tensor = torch.randn(6, 4)
    expected = digest(tensor)
    assert digest(tensor.t().contiguous().t()) == expected  # other strides
    buffer = torch.empty(25)
    buffer[1:] = tensor.flatten()
    assert digest(buffer[1:].view(6, 4)) == expected  # not aligned to 8 bytes
    assert digest(torch.empty(0)) == 0


def test_the_rank_that_differs_from_most_is_named() -> None:
    slot = ("head.weight", 0)
    three = [{slot: 5}, {slot: 5}, {("other", 0): 1}, {slot: 6}]
    assert "parameter head.weight differs on rank 3 from the one on ranks 0, 1," in _sentence(
        [slot], three, "after step 7"
    )
    two = _sentence([slot, ("b", 0)], [{slot: 5}, {slot: 6}], "after step 7")
    assert two.startswith(
        "after step 7, parameter head.weight differs on ranks 0, 1, and so do 1 other parameters"
    )
