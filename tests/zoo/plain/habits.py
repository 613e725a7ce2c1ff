"""Plain models with what people do beside the layers: hooks, sums on the way, caches, counters."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.plain.batches import CLASSES, LENGTH, WIDTH


class Tower(nn.Module):
    """Blocks and a head; subclasses say what is done with them."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.head = nn.Linear(WIDTH, CLASSES)


def halved(module: nn.Module, gradients: Any, _: Any) -> Any:
    """A hook: half of the gradient goes on."""
    return tuple(None if g is None else g / 2 for g in gradients)


class Backward(Tower):
    """Gradients are scaled on their way back, and a hook adds what goes in to what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_full_backward_hook(halved)
        self.blocks[3].register_forward_hook(lambda module, inputs, output: output + inputs[0])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        return F.cross_entropy(self.head(x), y)


class Twins(nn.Module):
    """Two views through the same layers, and through frozen ones: each layer runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.online = self.tower()
        self.target = self.tower().requires_grad_(False)
        self.guess = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def tower(self) -> nn.Sequential:
        layers = (nn.Linear(WIDTH, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, WIDTH))
        return nn.Sequential(*layers)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
        guesses = [self.guess(self.online(view)) for view in (a, b)]
        with torch.no_grad():
            known = [self.target(view) for view in (b, a)]
        alike = [F.cosine_similarity(*pair, dim=-1).mean() for pair in zip(guesses, known)]
        return {"loss": 2 - sum(alike), "guess": guesses[0]}


class Annealed(Tower):
    """Statistics of the batch that the first lines write, and the last ones read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.steps += 1
                self.mean.lerp_(x.mean(0), 0.1)
                self.scale.mul_(0.9).add_(x.abs().mean() * 0.1)
        h = (x - self.mean) / self.scale
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        restored = F.mse_loss(h, (x - self.mean) / self.scale)
        temperature = 1 + 0.1 * self.steps + self.mean.norm()
        return F.cross_entropy(self.head(h) / temperature, y) + 0.1 * restored


class Supervised(nn.Module):
    """A loss behind every block, added up in place; and the last one kept on the model."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(4))
        self.maps: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        losses, volume, self.maps = torch.zeros(()), x.new_zeros(len(x)), []
        for block, head in zip(self.blocks, self.heads):
            x = torch.tanh(block(x))
            self.maps.append(x.detach())
            losses += F.cross_entropy(head(x), y)
            volume -= x.abs().mean(1)
        losses /= len(self.blocks)
        self.last = losses + 0.1 * volume.mean()
        return self.last


class Discriminator(nn.Module):
    """Calls its layers, whose norms are bounded, on what is real and on what is not."""

    def __init__(self) -> None:
        super().__init__()
        bounded = nn.utils.spectral_norm
        sizes = ((3, 8, 4, 2), (8, 16, 4, 2), (16, 16, 3, 1))  # enough to be cut inside
        self.layers = nn.ModuleList(bounded(nn.Conv2d(*own, padding=1)) for own in sizes)
        self.last, self.head = nn.Conv2d(17, 16, 3, padding=1), nn.Linear(256, 1)

    def score(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.leaky_relu(layer(x), 0.2, inplace=True)
        spread = (x.var(0, unbiased=False) + 1e-8).sqrt().mean()
        x = torch.cat([x, spread.expand(len(x), 1, *x.shape[2:])], dim=1)
        out: torch.Tensor = self.head(F.leaky_relu(self.last(x), 0.2).flatten(1))
        return out.squeeze(1)

    def forward(self, x: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, ...]:
        real, fake = self.score(x), self.score(noise)
        return F.relu(1 - real).mean() + F.relu(1 + fake).mean(), real, fake


class Cached(nn.Module):
    """Rotary tables that are made when a length is first met, in buffers that are not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cos", None, persistent=False)
        self.register_buffer("sin", torch.empty(0), persistent=False)
        self.cached_length = 0
        self.embed, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11)
        self.projections = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(3))

    def tables(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.cached_length != length:
            self.cached_length = length
            angles = torch.outer(torch.arange(length), 100.0 ** -torch.arange(0, 1, 0.25))
            angles = torch.cat([angles, angles], dim=-1)[None, :, None]
            self.cos, self.sin = angles.cos(), angles.sin()
        return self.cos, self.sin

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        assert x.shape[1] <= LENGTH, f"{x.shape[1]} words are too many"
        h = self.embed(x)
        for projection in self.projections:
            q, k, v = (t.unflatten(-1, (2, -1)) for t in projection(h).chunk(3, -1))
            cos, sin = self.tables(x.shape[1])
            q, k = (t * cos + torch.cat([-t[..., 4:], t[..., :4]], -1) * sin for t in (q, k))
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            h = h + mixed.transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())
