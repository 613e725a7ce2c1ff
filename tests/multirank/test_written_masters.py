"""What a script writes into parameters that have float32 masters stays, in every layout."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import merak
from tests.multirank.ranks import RankPool, as_script
from tests.tiers import slow

STEPS, WIDTH = 5, 8
WRITES = ("in place", "alias", "data", "one row", "shards")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.down(torch.tanh(self.up(x))).float().square().mean()}


def model() -> nn.Module:
    torch.manual_seed(0)
    return Net().bfloat16()


def batch() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()}


@torch.no_grad()
def write(how: str, parameter: torch.Tensor, alias: torch.Tensor) -> None:
    if how in ("in place", "shards"):
        parameter.mul_(0.5)
    elif how == "alias":  # which was taken before the first step
        alias.mul_(0.5)
    elif how == "data":
        parameter.data = parameter.data * 0.5
    elif parameter.dim() == 2:
        parameter[-1].zero_()


@as_script
def losses(degrees: dict[str, int], options: dict[str, int], how: str) -> list[float]:
    merak.init(**degrees, device="cpu")
    net = model()
    parallel = merak.parallelize(
        net, batch(), optimizer=partial(torch.optim.SGD, lr=0.1), num_microbatches=1,
        master_weights=True, **options,
    )  # fmt: skip
    if how == "shards":  # a script that knows how parameters lie, of which nothing is refused
        assert all(name in parallel.engine.parameters for name in parallel.engine.shards)
    aliases = {name: parameter.data for name, parameter in net.named_parameters()}
    found = []
    for step in range(STEPS):
        found.append(float(parallel.step(batch())))
        for name, parameter in net.named_parameters():
            if step == 1 and not parameter.is_meta:
                write(how, parameter, aliases[name])
    return found


def losses_of_one_process(how: str) -> list[float]:
    net, found = model(), []
    masters = {name: p.detach().float() for name, p in net.named_parameters()}
    for step in range(STEPS):
        loss = net(**batch())["loss"]
        net.zero_grad()
        loss.backward()
        found.append(float(loss.detach()))
        for name, parameter in net.named_parameters():
            assert parameter.grad is not None
            masters[name] -= 0.1 * parameter.grad.float()
            parameter.data.copy_(masters[name])
            if step == 1:
                before = parameter.detach().clone()
                write(how, parameter, parameter.data)
                written = parameter.detach() != before
                masters[name][written] = parameter.detach().float()[written]
    return found


@pytest.mark.parametrize(
    ("degrees", "options", "how"),
    [
        ({"dp": 2}, {"zero": 1}, next(iter(WRITES))),
        *(slow({"dp": 2}, {"zero": 1}, how) for how in list(WRITES)[1:]),
        slow({"pp": 2}, {}, next(iter(WRITES))),
    ],
)
def test_writes_of_a_script_stay(
    pool: RankPool, degrees: dict[str, int], options: dict[str, int], how: str
) -> None:
    expected = losses_of_one_process(how)
    for found in pool.run(losses, 2, degrees, options, how):
        assert found == pytest.approx(expected, rel=1e-3)
