"""Statistics over a sharded dim, where one rank has all of it: those of torch."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from merak.core.mesh import Mesh, pretended
from merak.ops.sharded_statistics import (
    sharded_layer_norm,
    sharded_rms_norm,
    sharded_std,
    sharded_var,
    sharded_weight_norm,
)

SHAPE, NORMAL = (3, 4, 6), (4, 6)
ALONE = Mesh(1, 1, 1, 0, torch.device("cpu"), None)


def both(dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Values, a weight and a bias, twice."""
    torch.manual_seed(0)
    shapes = (SHAPE, NORMAL, NORMAL)
    first = [torch.randn(shape).add(1).to(dtype).requires_grad_() for shape in shapes]
    return first, [one.detach().clone().requires_grad_() for one in first]


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """But for the rounding of a few steps, relative to the largest: sums may cancel."""
    assert found.dtype == expected.dtype
    error = (found - expected).abs().max()
    assert error <= 16 * torch.finfo(found.dtype).eps * expected.abs().max()


def assert_alike(
    found: torch.Tensor,
    expected: torch.Tensor,
    own: list[torch.Tensor],
    others: list[torch.Tensor],
) -> None:
    assert_close(found, expected)
    upstream = torch.randn(expected.shape).to(expected.dtype)
    gradients = torch.autograd.grad(found, own, upstream)
    for one, other in zip(gradients, torch.autograd.grad(expected, others, upstream), strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_norms(dtype: torch.dtype) -> None:
    own, others = both(dtype)
    with pretended(ALONE):
        found = sharded_layer_norm(*own, 1e-5, 2, "tp")
        assert_alike(found, functional.layer_norm(others[0], NORMAL, *others[1:]), own, others)
        own, others = own[:2], others[:2]
        found = sharded_rms_norm(*own, None, 2, "tp")
        assert_alike(found, functional.rms_norm(others[0], NORMAL, others[1]), own, others)
        found = sharded_layer_norm(own[0], None, None, 1e-3, 1, "tp")
        expected = functional.layer_norm(others[0], SHAPE[-1:], eps=1e-3)
        assert_alike(found, expected, own[:1], others[:1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keepdim", [False, True])
def test_spread(dtype: torch.dtype, keepdim: bool) -> None:
    (own, *_), (other, *_) = both(dtype)
    with pretended(ALONE):
        found = sharded_var(own, (0, 2), 1.0, keepdim, "tp")
        assert_alike(found, other.var((0, 2), keepdim=keepdim), [own], [other])
        found = sharded_std(own, (1,), 0.0, keepdim, "tp")
        assert_alike(found, other.std(1, correction=0, keepdim=keepdim), [own], [other])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_weight_norm(dtype: torch.dtype) -> None:
    weight = torch.randn(6, 4, dtype=dtype)
    own, others = ([weight.clone().requires_grad_(), torch.ones(6, 1, dtype=dtype).requires_grad_()]
                   for _ in range(2))  # fmt: skip
    with pretended(ALONE):
        found = sharded_weight_norm(*own, 0, "tp")
        assert_alike(found, torch._weight_norm(*others, 0), own, others)


def test_no_deviation_has_no_gradient() -> None:
    own = torch.full((2, 4), 3.0, requires_grad=True)
    with pretended(ALONE):
        sharded_std(own, (1,), 0.0, False, "tp").sum().backward()
    assert own.grad is not None
    assert not own.grad.any()
