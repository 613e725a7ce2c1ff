"""Plain models of images, as people write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.plain.batches import CLASSES, WIDTH, Tensors


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.down = None if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.down is None else self.down(x)
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(True))
        self.layers = nn.Sequential(Residual(8, 8), Residual(8, 16, 2), Residual(16, 16))
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = F.adaptive_avg_pool2d(self.layers(F.max_pool2d(self.stem(x), 2)), 1)
        return F.cross_entropy(self.fc(torch.flatten(x, 1)), y)


def double(inputs: int, outputs: int) -> nn.Module:
    first = nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs))
    return nn.Sequential(first, nn.SiLU(), nn.Conv2d(outputs, outputs, 3, padding=1), nn.SiLU())


class UNet(nn.Module):
    """Skips from every level down to its level up: several tensors cross every cut."""

    def __init__(self) -> None:
        super().__init__()
        self.downs = nn.ModuleList([double(3, 4), double(4, 8), double(8, 16)])
        self.middle = double(16, 16)
        self.ups = nn.ModuleList([double(32, 8), double(16, 4), double(8, 4)])
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        skips = []
        for down in self.downs:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up in self.ups:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = up(torch.cat([x, skips.pop()], dim=1))
        logits = self.head(x)
        return F.cross_entropy(logits, y), logits


class Mixer(nn.Module):
    """An MLP-mixer: mixes over patches, then over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 4, 4)
        self.tokens = nn.ModuleList(self.mlp(16) for _ in range(2))
        self.channels = nn.ModuleList(self.mlp(WIDTH) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    @staticmethod
    def mlp(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        for i, (token, channel) in enumerate(zip(self.tokens, self.channels)):
            x = x + token(self.norms[2 * i](x).transpose(1, 2)).transpose(1, 2)
            x = x + channel(self.norms[2 * i + 1](x))
        return F.cross_entropy(self.head(x.mean(dim=1)), y)


class Bottleneck(nn.Module):
    """Narrow, convolve, widen, as in ResNet-50."""

    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            projected = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(projected, nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += identity
        return self.relu(out)


class BottleneckResNet(nn.Module):
    """ResNet-50 in small: gives scores, its loss is a module of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(Bottleneck(16, 8), Bottleneck(32, 8))
        self.layer2 = nn.Sequential(Bottleneck(32, 16, 2), Bottleneck(64, 16))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(64, CLASSES)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        scores: torch.Tensor = self.fc(torch.flatten(self.avgpool(self.layer2(self.layer1(x))), 1))
        return scores


def class_loss(outputs: torch.Tensor, batch: Tensors) -> torch.Tensor:
    return F.cross_entropy(outputs, batch["y"], label_smoothing=0.1)


class SqueezeExcite(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(width, width // 4, 1), nn.Conv2d(width // 4, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.up(F.relu(self.down(x.mean((2, 3), keepdim=True))))
        return x * F.hardsigmoid(scale)


class Convolutions(nn.Module):
    """Grouped, depthwise, dilated, strided and transposed convolutions, and a pooled pyramid."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding="same")
        self.grouped = nn.Conv2d(16, 32, 3, padding=1, groups=4)
        self.bn1, self.squeeze = nn.BatchNorm2d(32), SqueezeExcite(32)
        self.depthwise = nn.Conv2d(32, 32, 5, padding=2, groups=32, bias=False)
        self.pointwise = nn.Conv2d(32, 16, 1)
        self.dilated = nn.ModuleList(nn.Conv2d(16, 8, 3, padding=d, dilation=d) for d in (1, 2, 4))
        self.bn2 = nn.BatchNorm2d(24)
        self.reduce, self.grow = nn.Conv2d(24, 8, 3, 2, 1), nn.ConvTranspose2d(8, 8, 2, 2)
        self.head = nn.Conv2d(8 + 16, 2, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = F.leaky_relu(self.stem(x), 0.1)
        h = self.squeeze(F.hardswish(self.bn1(self.grouped(x))))
        h = self.pointwise(self.depthwise(h)) + x
        h = F.elu(self.bn2(torch.cat([conv(h) for conv in self.dilated], dim=1)))
        h = self.grow(F.avg_pool2d(F.relu(self.reduce(h)), 3, 1, 1))
        logits = self.head(torch.cat([h, x], dim=1))
        return F.cross_entropy(logits, y), logits


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(0.5 * torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        h = self.gamma * self.down(F.gelu(self.up(h)))
        return x + h.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 4, 4)
        self.stages = nn.Sequential(
            ConvNeXtBlock(WIDTH), nn.Conv2d(WIDTH, 32, 2, 2), ConvNeXtBlock(32)
        )
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Tensors:
        logits = self.head(self.norm(self.stages(self.stem(x)).mean((-2, -1))))
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


class VAE(nn.Module):
    """Encodes into a normal distribution and decodes a sample of it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 8, 4, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 4, 2, 1), nn.ReLU(), nn.Flatten()
        )
        self.mean, self.log_variance = nn.Linear(256, WIDTH), nn.Linear(256, WIDTH)
        self.start = nn.Linear(WIDTH, 256)
        self.decoder = nn.Sequential(
            nn.Unflatten(1, (16, 4, 4)),
            nn.ConvTranspose2d(16, 8, 4, 2, 1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.ConvTranspose2d(8, 3, 4, 2, 1),
            nn.Sigmoid(),
        )

    def forward(
        self, x: torch.Tensor, noise: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor | Tensors]:
        h = self.encoder(x)
        mean, log_variance = self.mean(h), self.log_variance(h)
        noise = torch.randn_like(mean) if noise is None else noise
        image = self.decoder(self.start(mean + noise * (0.5 * log_variance).exp()))
        reconstruction = F.binary_cross_entropy(image, x, reduction="sum") / x.shape[0]
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        parts = {"reconstruction": reconstruction, "divergence": divergence}
        return {"loss": reconstruction + divergence, "parts": parts, "image": image}
