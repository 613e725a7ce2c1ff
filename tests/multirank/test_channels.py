"""Convolutions with norms, pooling and resizing between them share out channels, and train."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from merak.check import Case, CheckOptions, Job, Layout
from tests.multirank.check_on import check_on
from tests.multirank.ranks import RankPool

WIDTH, WIDE = 8, 32
Between = Callable[[int], nn.Module]


class Block(nn.Module):
    """x + down(between(up(x)))."""

    def __init__(self, between: Between, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.between, self.down = up, between(WIDE), down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(F.silu(self.between(self.up(x))))
        return out


class Standardised(nn.Conv2d):
    """A convolution whose weight is normalised over its inputs, as of BiT."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(flat, None, None, training=True).reshape_as(self.weight)
        return F.conv2d(x, weight, self.bias, padding=1)


def standardised(between: Between) -> nn.Module:
    made = convolved(between)
    made.up = Standardised(WIDTH, WIDE, 3)
    return made


def convolved(between: Between, groups: int = 1) -> nn.Module:
    up = nn.Conv2d(WIDTH, WIDE, 3, padding=1, groups=groups)
    return Block(between, up, nn.Conv2d(WIDE, WIDTH, 3, padding=1, groups=groups))


def resized(between: Between) -> nn.Module:
    """A smaller image between the convolutions, and a transposed one back."""
    made = convolved(lambda c: nn.Sequential(nn.MaxPool2d(2), between(c), nn.AvgPool2d(1)))
    made.down = nn.ConvTranspose2d(WIDE, WIDTH, 2, stride=2)
    return made


def enlarged(between: Between) -> nn.Module:
    steps = (nn.Upsample(scale_factor=2), nn.ReflectionPad2d(1), nn.MaxPool2d(2, padding=0))
    made = convolved(lambda c: nn.Sequential(between(c), *steps))
    made.up = nn.ConvTranspose2d(WIDTH, WIDE, 3, padding=1)
    made.down = nn.Sequential(nn.Conv2d(WIDE, WIDTH, 3, padding=1), nn.AdaptiveAvgPool2d(4))
    return made


def groups(channels: int) -> nn.Module:
    return nn.GroupNorm(4, channels)


def instances(channels: int) -> nn.Module:
    return nn.InstanceNorm2d(channels, affine=True)


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: convolved(nn.BatchNorm2d),
    "batch, no running statistics": lambda: convolved(
        lambda channels: nn.BatchNorm2d(channels, track_running_stats=False)
    ),
    "groups": lambda: convolved(groups),
    "instances": lambda: convolved(instances),
    "resized": lambda: resized(groups),
    "enlarged": lambda: enlarged(nn.BatchNorm2d),
    "standardised": lambda: standardised(groups),
    "in groups": lambda: convolved(nn.BatchNorm2d, groups=4),
}


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 1)
        self.blocks = nn.ModuleList(make() for make in BLOCKS.values())

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return {"loss": (x - 1).pow(2).mean()}


def draw(step: int, samples: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(samples, 3, 4, 4, generator=torch.Generator().manual_seed(step))}


def test_channels(pool: RankPool) -> None:
    """All kinds of blocks in one model."""
    options = CheckOptions("1f1b", num_microbatches=2, microbatch=2, steps=2, evaluate=True)
    checked = Job(Case("images", Images, draw), Layout(tp=2, pp=2), options)
    report = check_on(pool, checked)
    assert report.tp_sharded_fraction > 0.9
