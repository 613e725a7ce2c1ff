"""Models whose forward writes buffers, of each kind, to train on replicas."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

WIDTH, ROWS = 8, 16


class Blocks(nn.Module):
    """Two layers, and a step for what is between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def between(self, h: Tensor, x: Tensor) -> Tensor:
        """What a model does with its first layer's output."""
        return h

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.between(self.first(x), x))).square().mean()


class Averaged(Blocks):
    """An average of a weight, which follows it and is a teacher; and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.randn(WIDTH, WIDTH))
        self.register_buffer("count", torch.zeros(()))

    def between(self, h: Tensor, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.count += 1
                self.average.lerp_(self.first.weight, 1 / (1 + self.count))
        return h - F.linear(x, self.average)


class Spectral(Blocks):
    """A norm whose vectors are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = spectral_norm(self.first)


class BatchNormed(Blocks):
    """Running statistics that evaluation alone reads, and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def between(self, h: Tensor, x: Tensor) -> Tensor:
        return self.norm(h)


class Watched(BatchNormed):
    """Running statistics that training reads as well."""

    def between(self, h: Tensor, x: Tensor) -> Tensor:
        return self.norm(h) - self.norm.running_mean


class Queued(Blocks):
    """Keys of past samples, each told from those of the batch; and where the next ones go."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.randn(ROWS, WIDTH))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        query, key = self.first(x), F.normalize(self.second(x), dim=-1)
        odds = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone().t()], 1)
        if self.training:
            with torch.no_grad():
                places = (self.place + torch.arange(len(x))) % ROWS
                self.queue.index_copy_(0, places, key)
                self.place.copy_((self.place + len(x)) % ROWS)
        return F.cross_entropy(odds, torch.zeros(len(x), dtype=torch.long))


class Drawn(Blocks):
    """Noise that is kept, drawn anew by every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("noise", torch.zeros(WIDTH))

    def between(self, h: Tensor, x: Tensor) -> Tensor:
        self.noise.copy_(torch.randn(WIDTH))
        return h + self.noise


class Followed(Averaged):
    """A buffer that samples write, and another that only follows it, read in a later layer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))

    def between(self, h: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.mul_(0.5).add_(self.seen)
            self.seen.copy_(x.mean(0))
        return h - F.linear(x, self.average)


class Held(Blocks):
    """A tensor in a dict, no buffer: the last layer makes it, the first evaluates with it."""

    def __init__(self) -> None:
        super().__init__()
        self.held = {"mean": torch.zeros(WIDTH)}

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x if self.training else x - self.held["mean"]))
        h = self.second(h)
        if self.training:
            h = h - self.held["mean"]
            self.held["mean"] = h.detach().mean(0)
        return h.square().mean()


def draw(step: int, samples: int) -> dict[str, Tensor]:
    """The batch of a step, which differs from sample to sample."""
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(samples, WIDTH, generator=generator) + 1}
