"""Signs of gradients: their bytes, and what is decoded of them."""

from __future__ import annotations

import pytest
import torch

from merak.engine.comm.sign_compression import _decoded, _encoded
from merak.plan.gradient_compression import compressed_bytes, num_scales


@pytest.mark.parametrize("shape", [(1,), (7,), (8,), (3, 5), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_decoded_has_the_signs_and_the_mean_magnitude(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    encoded = _encoded(gradient)
    assert encoded.dtype == torch.uint8
    assert encoded.numel() == compressed_bytes("1bit", shape, dtype.itemsize)
    decoded = _decoded(encoded, gradient)
    assert decoded.shape == gradient.shape and decoded.dtype == dtype
    assert torch.equal(decoded >= 0, gradient >= 0)
    rows = decoded.view(num_scales(shape), -1).abs()
    assert torch.equal(rows, rows[:, :1].expand_as(rows))
    means = gradient.view(num_scales(shape), -1).abs().double().mean(dim=1)
    rounding = 1e-2 if dtype == torch.bfloat16 else 1e-6
    assert rows[:, 0].tolist() == pytest.approx(means.tolist(), rel=rounding)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    gradient = torch.tensor([1.0, bad, 2.0])
    assert not torch.isfinite(_decoded(_encoded(gradient), gradient)).any()
