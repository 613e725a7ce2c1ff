from __future__ import annotations

import pytest
import torch
from torch import nn

from merak.core.gradients import add_gradient
from merak.core.shards import ParameterShard
from merak.engine.comm.gradient_buckets import GradientReducer, StageGradients, fill_buckets
from merak.engine.comm.gradient_norm import clip_gradients, global_norm
from merak.engine.health.status import Progress
from merak.engine.health.step_records import HostClock

CPU = torch.device("cpu")


def make_parameters(scale: float = 1.0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((3, 4), (5,), (2, 2, 2), ())]
    for parameter in parameters[:-1]:
        parameter.grad = torch.randn(parameter.shape, generator=generator) * scale
    return parameters  # the last one has no gradient


def test_the_norm_is_torchs() -> None:
    parameters = make_parameters()
    gradients = [p.grad for p in parameters if p.grad is not None]
    found = global_norm(parameters, {}, 1, (None, None), CPU)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(nn.utils.get_total_norm(gradients).item(), rel=1e-6)


def test_the_norm_of_float64_gradients_is_as_exact_as_they_are() -> None:
    parameters = [nn.Parameter(p.detach().double()) for p in make_parameters()]
    for parameter, other in zip(parameters, make_parameters(), strict=True):
        parameter.grad = None if other.grad is None else other.grad.double() / 3
    gradients = [p.grad for p in parameters if p.grad is not None]
    found = global_norm(parameters, {}, 1, (None, None), CPU)
    assert found.dtype == torch.float64
    assert found.item() == pytest.approx(nn.utils.get_total_norm(gradients).item(), rel=1e-14)


def test_whole_parameters_count_once_over_tp_ranks() -> None:
    parameters = make_parameters()
    split = {id(parameters[0]): ParameterShard(0, (12,), 4)}
    found = global_norm(parameters, split, 4, (None, None), CPU)
    squares = [float(p.grad.square().sum()) for p in parameters if p.grad is not None]
    assert found.item() ** 2 == pytest.approx(squares[0] + sum(squares[1:]) / 4, rel=1e-6)


def test_whole_parts_of_a_fused_parameter_count_once_over_tp_ranks() -> None:
    parameters = make_parameters()
    split = {id(parameters[0]): ParameterShard(0, (8, 1), 4, whole=(1,))}
    found = global_norm(parameters[:1], split, 4, (None, None), CPU)
    gradient = parameters[0].grad
    assert gradient is not None
    expected = float(gradient[:2].square().sum()) + float(gradient[2].square().sum()) / 4
    assert found.item() ** 2 == pytest.approx(expected, rel=1e-6)


def test_no_gradients_have_the_norm_zero() -> None:
    found = global_norm([nn.Parameter(torch.ones(3))], {}, 1, (None, None), CPU)
    assert found.item() == 0.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_in_the_norm(bad: float) -> None:
    parameters = make_parameters()
    assert parameters[1].grad is not None
    parameters[1].grad[2] = bad
    assert not torch.isfinite(global_norm(parameters, {}, 1, (None,), CPU))


@pytest.mark.parametrize("max_norm", [0.1, 100.0])
def test_clipping_is_torchs(max_norm: float) -> None:
    own, other = make_parameters(3.0), make_parameters(3.0)
    norm = global_norm(own, {}, 1, (None, None), CPU)
    clip_gradients(own, norm, max_norm)
    nn.utils.clip_grad_norm_(other, max_norm)
    for one, two in zip(own, other, strict=True):
        if two.grad is None:
            assert one.grad is None
        else:
            assert one.grad is not None
            assert torch.allclose(one.grad, two.grad, rtol=1e-6, atol=0.0)


def test_gradients_add_up() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    add_gradient(parameter, torch.tensor([1.0, 2.0]))
    add_gradient(parameter, torch.tensor([10.0, 20.0]))
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [11.0, 22.0]


def test_a_single_replica_reduces_nothing() -> None:
    parameters = make_parameters()
    reducer = GradientReducer(
        {0: StageGradients(None, fill_buckets(parameters, 1))}, Progress(HostClock(), 0)
    )
    before = [p.grad for p in parameters]
    reducer.start_step([0])
    reducer.ready(0, parameters)
    reducer.complete(0)
    reducer.wait()
    assert all(p.grad is gradient for p, gradient in zip(parameters, before, strict=True))


def test_buckets_are_closed_when_full_and_hold_one_dtype() -> None:
    four, five, eight, one = make_parameters()  # 12, 5, 8 and 1 elements
    half = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
    assert fill_buckets([four, five, frozen, eight, one], 60) == ((four, five), (eight, one))
    assert fill_buckets([four, half, five], 1000) == ((four,), (half,), (five,))
    assert fill_buckets([], 60) == ()
