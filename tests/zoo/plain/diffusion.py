"""Plain models that denoise, as people write them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.plain.batches import CLASSES, WIDTH, Tensors
from tests.zoo.plain.images import Mixer


class Diffusion(nn.Module):
    """A small DiT: the condition modulates every block, so it crosses every cut."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 4, 4)
        self.condition = nn.Embedding(CLASSES, WIDTH)
        self.modulate = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(3))
        self.mlp = nn.ModuleList(Mixer.mlp(WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.head = nn.Linear(WIDTH, 3 * 16)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.patch(x).flatten(2).transpose(1, 2)
        condition = F.silu(self.condition(y))
        for modulate, mlp in zip(self.modulate, self.mlp):
            shift, scale, gate = modulate(condition).unsqueeze(1).chunk(3, dim=-1)
            h = h + gate * mlp(self.norm(h) * (1 + scale) + shift)
        return (self.head(h) - F.unfold(x, 4, stride=4).transpose(1, 2)).square().mean()


def frequencies(t: torch.Tensor, width: int) -> torch.Tensor:
    """Sines and cosines of timesteps, (samples, width)."""
    half = torch.arange(width // 2, device=t.device, dtype=torch.float32)
    angles = t[:, None].float() * torch.exp(-math.log(10000.0) * half / (width // 2))[None]
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def time_embedding(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))


class DiTBlock(nn.Module):
    """Attention and feed-forward, each shifted, scaled and gated by the condition (adaLN)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v)
        mixed: torch.Tensor = self.proj(out.transpose(1, 2).reshape(b, n, c))
        return mixed

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c)[:, None].chunk(6, dim=-1)
        x = x + gate1 * self.attend(self.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    """A diffusion transformer: patches in, a guess of the noise out."""

    def __init__(self, width: int = 32, depth: int = 2, patch: int = 4) -> None:
        super().__init__()
        self.patch = patch
        self.embed = nn.Conv2d(3, width, patch, patch)
        self.register_buffer("positions", frequencies(torch.arange(16), width)[None])
        self.time, self.label = time_embedding(width), nn.Embedding(CLASSES, width)
        self.blocks = nn.ModuleList(DiTBlock(width, 4) for _ in range(depth))
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))
        self.out = nn.Linear(width, patch * patch * 3)
        self.width = width
        for name, module in self.named_modules():
            if name.endswith("modulation.1"):
                # Zeros in the paper; then most gradients of a first step would be zeros as well.
                nn.init.normal_(module.weight, std=0.2)
                nn.init.zeros_(module.bias)

    def unpatchify(self, x: torch.Tensor) -> torch.Tensor:
        side = int(x.shape[1] ** 0.5)
        x = x.reshape(x.shape[0], side, side, self.patch, self.patch, 3)
        x = torch.einsum("nhwpqc->nchpwq", x)
        return x.reshape(x.shape[0], 3, side * self.patch, side * self.patch)

    def forward(self, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.embed(x).flatten(2).transpose(1, 2) + self.positions
        c = self.time(frequencies(t, self.width)) + self.label(y)
        for block in self.blocks:
            h = block(h, c)
        shift, scale = self.modulation(c)[:, None].chunk(2, dim=-1)
        return self.unpatchify(self.out(self.norm(h) * (1 + scale) + shift))


class TimedResidual(nn.Module):
    """Two convolutions with group norms, the timestep added between them."""

    def __init__(self, inputs: int, outputs: int, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(time, outputs)
        self.norm2, self.conv2 = nn.GroupNorm(4, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.dropout = nn.Dropout(0.1)
        self.skip = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.time(F.silu(t))[:, :, None, None]
        out: torch.Tensor = self.conv2(self.dropout(F.silu(self.norm2(h)))) + self.skip(x)
        return out


class ImageAttention(nn.Module):
    """Every pixel looks at every other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, width)
        self.qkv, self.proj = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, 3, c, h * w).unbind(1)
        weights = torch.softmax(torch.einsum("bci,bcj->bij", q, k) * c**-0.5, dim=-1)
        mixed = torch.einsum("bij,bcj->bci", weights, v).reshape(b, c, h, w)
        out: torch.Tensor = x + self.proj(mixed)
        return out


class DenoisingUNet(nn.Module):
    """The U-Net of denoising diffusion: time in every block, attention in the middle, skips."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.width = width
        self.time = time_embedding(width)
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        widths = [width, 2 * width]
        self.down = nn.ModuleList(
            [TimedResidual(width, width, width), TimedResidual(width, 2 * width, width)]
        )
        self.shrink = nn.ModuleList(nn.Conv2d(c, c, 3, stride=2, padding=1) for c in widths)
        self.middle1 = TimedResidual(2 * width, 2 * width, width)
        self.attention = ImageAttention(2 * width)
        self.middle2 = TimedResidual(2 * width, 2 * width, width)
        self.grow = nn.ModuleList(nn.Conv2d(2 * width, 2 * width, 3, padding=1) for _ in widths)
        self.up = nn.ModuleList(TimedResidual(2 * width + c, 2 * width, width) for c in widths)
        self.norm, self.out = nn.GroupNorm(4, 2 * width), nn.Conv2d(2 * width, 3, 3, padding=1)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        time = self.time(frequencies(t, self.width))
        x, skips = self.stem(x), []
        for down, shrink in zip(self.down, self.shrink):
            x = down(x, time)
            skips.append(x)
            x = shrink(x)
        x = self.middle2(self.attention(self.middle1(x, time)), time)
        for grow, up in zip(self.grow, reversed(self.up)):
            x = grow(F.interpolate(x, scale_factor=2, mode="nearest"))
            x = up(torch.cat([x, skips.pop()], dim=1), time)
        noise: torch.Tensor = self.out(F.silu(self.norm(x)))
        return noise


def noise_loss(outputs: torch.Tensor, batch: Tensors) -> torch.Tensor:
    """How far the guess is from the noise that was added."""
    return F.mse_loss(outputs, batch["noise"])
