from __future__ import annotations

import pytest
import torch

from merak.core.tensor_meta import TensorMeta
from merak.plan.cost.optimizer_memory import OptimizerMemories, optimizer_memory

PARAMETERS = [TensorMeta((100, 10), torch.float32, True), TensorMeta((7,), torch.float32, True)]
CPU = torch.device("cpu")
COUNT = 4
"""Bytes of a count of steps."""


@pytest.mark.parametrize(
    ("options", "copies", "extra"),
    [
        ({"cls": torch.optim.AdamW}, 2, COUNT),
        ({"cls": torch.optim.AdamW, "foreach": True}, 2, COUNT),
        ({"cls": torch.optim.AdamW, "fused": True}, 2, COUNT),
        ({"cls": torch.optim.AdamW, "amsgrad": True}, 3, COUNT),
        ({"cls": torch.optim.SGD}, 0, 0),
        ({"cls": torch.optim.SGD, "momentum": 0.9}, 1, 0),
        ({"cls": torch.optim.Adagrad}, 1, COUNT),
    ],
)
def test_state_is_that_of_the_optimizer_itself(options, copies, extra):
    chosen = dict(options)
    cls = chosen.pop("cls")
    found = optimizer_memory(lambda p: cls(p, lr=0.1, **chosen), PARAMETERS, CPU)
    assert found.state_bytes == tuple(copies * meta.num_bytes + extra for meta in PARAMETERS)


def test_taken_bytes_are_those_of_a_real_step():
    from merak.core.storages import Storages

    def adam(parameters):
        return torch.optim.AdamW(parameters, lr=0.1, foreach=True)

    found = optimizer_memory(adam, PARAMETERS, CPU)
    real = [torch.nn.Parameter(torch.ones(meta.shape)) for meta in PARAMETERS]
    for parameter in real:
        parameter.grad = torch.ones_like(parameter)
    optimizer = adam(real)
    optimizer.step()
    state = [t for s in optimizer.state.values() for t in s.values()]
    with Storages([*real, *(p.grad for p in real), *state]) as storages:
        optimizer.step()
    assert found.taken_bytes == storages.peak_bytes > 0


class Looks(torch.optim.SGD):
    """Steps by a number that it reads from its gradients."""

    def read(self, parameter):
        return float(parameter.grad.norm())

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if self.read(parameter) > 0:
                    row = self.state[parameter].setdefault(
                        "row", parameter.new_zeros(len(parameter))
                    )
                    row.add_(1)


class Iterates(Looks):
    """Reads numbers until one is small."""

    def read(self, parameter):
        while float(parameter.grad.norm()) > 0.5:
            parameter.grad.mul_(0.5)
        return 1.0


def test_one_that_reads_numbers_is_measured():
    found = optimizer_memory(lambda p: Looks(p, lr=0.1), PARAMETERS, CPU)
    assert found.state_bytes == (400, 28)


def test_one_that_cannot_step_fake_parameters_counts_two_copies(caplog, monkeypatch):
    monkeypatch.setattr("merak.plan.cost.optimizer_memory._MOST_READS", 10)
    found = optimizer_memory(lambda p: Iterates(p, lr=0.1), PARAMETERS, CPU)
    assert found.state_bytes == tuple(2 * meta.num_bytes for meta in PARAMETERS)
    assert "is not known before it runs" in caplog.text


def test_no_optimizer_holds_nothing():
    assert optimizer_memory(None, PARAMETERS, CPU).state_bytes == (0, 0)


@pytest.mark.parametrize("kernels", [None, "cuda"])
@pytest.mark.parametrize(
    "factory",
    [
        lambda p: torch.optim.AdamW(p, lr=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.Adafactor(p, lr=0.1),
        lambda p: torch.optim.LBFGS(p, lr=0.1),
    ],
)
def test_a_list_is_forecast_from_its_kinds(factory, kernels):
    low = TensorMeta((100, 10), torch.bfloat16, True)
    memories = OptimizerMemories(factory, CPU)
    averaged = OptimizerMemories(factory, CPU, 0.9)(PARAMETERS, kernels).state_bytes
    states = zip(memories(PARAMETERS, kernels).state_bytes, PARAMETERS, strict=True)
    assert averaged == tuple(state + meta.num_bytes for state, meta in states)
    for own in (PARAMETERS, [*PARAMETERS, *PARAMETERS[1:] * 3], [low, *PARAMETERS, low]):
        assert memories(own, kernels) == optimizer_memory(factory, own, CPU, kernels)
        assert memories(own, kernels) == optimizer_memory(factory, own, CPU, kernels)  # known
