"""Norms of all gradients of one rank: torch's own, and of lower precision without rounding."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from merak.engine.comm.gradient_norm import global_norm, pipeline_norm

CPU = torch.device("cpu")


def gradients(*dtypes: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    sizes = (64, 8, 300, 24)
    return {
        f"p{i}": torch.randn(size, generator=generator).to(dtypes[i % len(dtypes)])
        for i, size in enumerate(sizes)
    }


def both(found: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    parameters = []
    for gradient in found.values():
        parameters.append(nn.Parameter(torch.zeros_like(gradient)))
        parameters[-1].grad = gradient
    return (
        pipeline_norm(found, list(found), None, CPU),
        global_norm(parameters, {}, 1, [None], CPU),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_norm_of_a_pipeline_is_torchs_own(dtype: torch.dtype) -> None:
    found = gradients(dtype)
    expected = nn.utils.get_total_norm(list(found.values()))
    pipeline, anywhere = both(found)
    assert torch.equal(pipeline, expected)
    torch.testing.assert_close(anywhere, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16,), (torch.float16,), (torch.bfloat16, torch.float32)], ids=str
)
def test_gradients_of_lower_precision_have_norms_that_are_not_rounded(
    dtypes: tuple[torch.dtype, ...],
) -> None:
    found = gradients(*dtypes)
    exact = torch.cat([gradient.double() for gradient in found.values()]).norm()
    for norm in both(found):
        assert norm.dtype == torch.float32
        torch.testing.assert_close(norm.double(), exact, rtol=1e-6, atol=0)


def test_a_norm_beyond_half_precision_is_finite() -> None:
    found = {"p": torch.full((64,), 6e4, dtype=torch.float16)}
    for norm in both(found):
        assert norm.item() == pytest.approx(8 * 6e4, rel=1e-3)
