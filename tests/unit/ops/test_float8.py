"""Linear layers in float8: precision, gradients, scales of all ranks, and what is not a number."""

from __future__ import annotations

import math

import pytest
import torch

from merak.ops.float8 import OF_GRADIENTS, OF_VALUES, float8_linears
from tests.ranks_in_turns import RanksInTurns

ROWS, INPUTS, OUTPUTS = 32, 48, 64


def operands(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """What a layer reads, its weight and bias, and the gradient of its results."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, ROWS // 2, INPUTS), (OUTPUTS, INPUTS), (OUTPUTS,), (2, ROWS // 2, OUTPUTS))
    x, weight, bias, gradient = (torch.randn(s, generator=generator).to(dtype) for s in shapes)
    weight[-1, -1] = 20.0  # in one shard alone, whichever way it is cut
    x[0, 0, -1] = 30.0
    return x, weight, bias, gradient


def run(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gradient: torch.Tensor,
    axes: tuple[str, ...] = (),
) -> tuple[torch.Tensor, ...]:
    """Results of a layer, and gradients of what it reads and of its weight."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    (out,) = float8_linears(x, (weight,), (bias,), x.dtype, axes)
    out.backward(gradient)
    assert x.grad is not None and weight.grad is not None
    return out.detach(), x.grad, weight.grad


def in_eight_bits(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values that an operand has once it is cast, in float64."""
    scale = 2.0 ** (
        math.floor(math.log2(torch.finfo(dtype).max)) - math.frexp(x.abs().max().item())[1]
    )
    return (x.float() * scale).to(dtype).double() / scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_operands_in_eight_bits(dtype: torch.dtype) -> None:
    x, weight, bias, gradient = operands(dtype)
    found = run(x, weight, bias, gradient)
    assert [own.dtype for own in found] == [dtype] * 3
    a, b = in_eight_bits(x, OF_VALUES), in_eight_bits(weight, OF_VALUES)
    g = in_eight_bits(gradient, OF_GRADIENTS)
    of_weight = g.flatten(0, 1).t() @ a.flatten(0, 1)
    for own, expected in zip(found, (a @ b.t() + bias.double(), g @ b, of_weight), strict=True):
        rounding = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(own.double(), expected, rtol=rounding, atol=100 * rounding)
    whole = x.double() @ weight.double().t() + bias.double()
    assert 1e-3 < ((found[0].double() - whole).norm() / whole.norm()).item() < 0.1


def test_shards_are_cast_as_the_whole_is() -> None:
    x, weight, _, gradient = operands()
    whole = run(x, weight, None, gradient)
    outputs, inputs = OUTPUTS // 2, INPUTS // 2

    def by_outputs(rank: int) -> tuple[torch.Tensor, ...]:
        own = slice(rank * outputs, (rank + 1) * outputs)
        return run(x, weight[own], None, gradient[..., own].contiguous(), ("tp",))

    def by_inputs(rank: int) -> tuple[torch.Tensor, ...]:
        own = slice(rank * inputs, (rank + 1) * inputs)
        return run(x[..., own].contiguous(), weight[:, own].contiguous(), None, gradient, ("tp",))

    found = list(zip(*RanksInTurns(2).run(by_outputs), strict=True))
    joined = (torch.cat(found[0], -1), sum(found[1]), torch.cat(found[2]))
    for own, expected in zip(joined, whole, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-3)
    found = list(zip(*RanksInTurns(2).run(by_inputs), strict=True))
    joined = (sum(found[0]), torch.cat(found[1], -1), torch.cat(found[2], -1))
    for own, expected in zip(joined, whole, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-3)


def test_a_shard_without_the_largest_element_has_its_scale() -> None:
    x, weight, _, gradient = operands()
    weight[-1, -1] = 2.0**15  # beside which the others have fewer bits
    whole = run(x, weight, None, gradient)[0][..., : OUTPUTS // 2]

    def shard(rank: int, *axes: str) -> torch.Tensor:
        own = slice(rank * OUTPUTS // 2, (rank + 1) * OUTPUTS // 2)
        return run(x, weight[own], None, gradient[..., own].contiguous(), axes)[0]

    shared = RanksInTurns(2).run(lambda rank: shard(rank, "tp"))[0]
    torch.testing.assert_close(shared, whole, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(shard(0), whole, rtol=1e-2, atol=1e-2)


def test_layers_that_read_the_same_cast_it_once() -> None:
    x, weight, bias, gradient = operands(torch.bfloat16)
    other = weight[:16].flip(0).contiguous()
    first, second = (
        run(x, weight, bias, gradient),
        run(x, other, None, gradient[..., :16].contiguous()),
    )
    own = [tensor.detach().requires_grad_() for tensor in (x, weight, other)]
    found = float8_linears(own[0], own[1:], (bias, None), x.dtype, ())
    torch.autograd.backward(found, (gradient, gradient[..., :16]))
    assert torch.equal(found[0], first[0]) and torch.equal(found[1], second[0])
    assert torch.equal(own[1].grad, first[2]) and torch.equal(own[2].grad, second[2])
    assert torch.equal(own[0].grad, first[1] + second[1])


@pytest.mark.parametrize("size", [1e-40, 1e-30, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_magnitude_has_a_scale(dtype: torch.dtype, size: float) -> None:
    x, weight, bias, gradient = operands(dtype)
    x = x * size if dtype != torch.float16 else x * 2.0**-16
    assert all(own.isfinite().all() for own in run(x, weight, bias, gradient * 2.0**-12))


def test_what_is_not_finite_stays_so() -> None:
    for value in (torch.inf, torch.nan):
        x, weight, bias, gradient = operands()
        x[0, 0, 0] = value
        assert not run(x, weight, bias, gradient)[0].isfinite().all()
        x, weight, bias, gradient = operands()
        gradient[0, 0, 0] = value
        assert not run(x, weight, bias, gradient)[2].isfinite().all()


def test_zeros_have_a_product() -> None:
    x, weight, _, gradient = operands()
    out, of_x, of_weight = run(torch.zeros_like(x), weight, None, torch.zeros_like(gradient))
    assert not out.any() and not of_x.any() and not of_weight.any()
