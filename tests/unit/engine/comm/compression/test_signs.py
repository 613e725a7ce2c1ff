"""Signs of gradients: their bytes, and what is decoded of them."""

from __future__ import annotations

import pytest
import torch

from merak.engine.comm.compression.signs import _decoded, _encoded, _lengths, _scales, served_rows
from merak.plan.gradient_compression import compressed_bytes, num_scales


def sent(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of a matrix, and what is decoded of them."""
    encoded = _encoded([matrix], [_scales(matrix)])
    return encoded, _decoded(encoded, _lengths([matrix]), matrix.dtype).view(matrix.shape)


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (8, 1), (3, 5), (2, 12)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_decoded_has_the_signs_and_the_mean_magnitude(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    encoded, decoded = sent(gradient)
    assert encoded.dtype == torch.uint8
    assert encoded.numel() == compressed_bytes("1bit", shape, dtype.itemsize)
    assert decoded.dtype == dtype
    assert torch.equal(decoded >= 0, gradient >= 0)
    rows = decoded.abs()
    assert torch.equal(rows, rows[:, :1].expand_as(rows))
    means = gradient.abs().double().mean(dim=1)
    rounding = 1e-2 if dtype == torch.bfloat16 else 1e-6
    assert rows[:, 0].tolist() == pytest.approx(means.tolist(), rel=rounding)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    assert not torch.isfinite(sent(torch.tensor([[1.0, bad, 2.0]]))[1]).any()


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_row_is_served_once(size: int) -> None:
    shapes = [(5, 3), (7,), (16, 2, 2), (1,), (2, 9)]
    by_server = [served_rows(shapes, server, size) for server in range(size)]
    for shape, own in zip(shapes, zip(*by_server, strict=True), strict=True):
        rows = [row for start, stop in own for row in range(start, stop)]
        assert sorted(rows) == list(range(num_scales(shape)))
    vectors = [sum(b - a for a, b in (own[1], own[3])) for own in by_server]
    assert max(vectors) == (2 if size == 1 else 1)  # not all on one replica
