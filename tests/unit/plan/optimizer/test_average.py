"""Moving averages among the states of an optimizer, against torch's AveragedModel."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from merak.checkpoint.optimizer_state import AVERAGE
from merak.plan.optimizer.average import forget_averages, keep_averages


def step(model: nn.Linear, optimizer: torch.optim.Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)).to(model.weight.dtype)
    model(x).float().square().mean().backward()
    optimizer.step()


def test_averages_are_those_of_torch() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    expected = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    keep_averages(optimizer, 0.7)
    for seed in range(4):
        step(model, optimizer, seed)
        expected.update_parameters(model)
        for own, other in zip(model.parameters(), expected.module.parameters(), strict=True):
            assert torch.equal(optimizer.state[own][AVERAGE], other)
    assert not torch.equal(model.weight, expected.module.weight)
    forget_averages(optimizer)
    assert AVERAGE not in optimizer.state[model.weight]
    step(model, optimizer, 4)  # which begins anew
    assert torch.equal(optimizer.state[model.weight][AVERAGE], model.weight)


def test_a_step_that_the_device_leaves_out_leaves_the_average() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    keep_averages(optimizer, 0.7)
    for seed in range(2):
        step(model, optimizer, seed)
    before = optimizer.state[model.weight][AVERAGE].clone()
    for left_out, same in ((1.0, True), (0.0, False)):
        optimizer.grad_scale, optimizer.found_inf = None, torch.tensor(left_out)
        step(model, optimizer, 2)
        assert torch.equal(optimizer.state[model.weight][AVERAGE], before) is same


def test_an_average_of_a_low_precision_is_in_float32() -> None:
    model = nn.Linear(4, 2).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keep_averages(optimizer, 0.99)
    values = []
    for seed in range(3):
        step(model, optimizer, seed)
        values.append(model.weight.detach().float())
    average = values[0]
    for value in values[1:]:
        average = average.lerp(value, 1 - 0.99)
    assert torch.equal(optimizer.state[model.weight][AVERAGE], average)


def test_what_has_no_gradient_is_not_averaged() -> None:
    used, unused = nn.Linear(4, 2), nn.Linear(4, 2)
    optimizer = torch.optim.AdamW([*used.parameters(), *unused.parameters()], lr=0.1)
    keep_averages(optimizer, 0.7)
    step(used, optimizer, 0)
    assert AVERAGE not in optimizer.state.get(unused.weight, {})
    step(unused, optimizer, 1)  # which has no state before
    assert torch.equal(optimizer.state[unused.weight][AVERAGE], unused.weight)
