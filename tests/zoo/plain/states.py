"""Plain models with state: buffers that forward writes, and weights made of other weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.plain.batches import CLASSES, WIDTH, Tensors
from tests.zoo.plain.images import Mixer


class Quantizer(nn.Module):
    """The nearest of some codes, which follow what chooses them (buffers, no gradient)."""

    def __init__(self, codes: int, width: int, decay: float = 0.9) -> None:
        super().__init__()
        self.decay = decay
        self.register_buffer("codes", torch.randn(codes, width))
        self.register_buffer("sizes", torch.ones(codes))
        self.register_buffer("sums", self.codes.clone())
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        flat = x.reshape(-1, x.shape[-1])
        chosen = torch.cdist(flat, self.codes).argmin(dim=1)
        quantized = F.embedding(chosen, self.codes).view_as(x)
        if self.training:
            self._follow(flat.detach(), F.one_hot(chosen, len(self.codes)).to(flat.dtype))
        distance = F.mse_loss(x, quantized.detach())
        return x + (quantized - x).detach(), distance, chosen.view(x.shape[:-1])

    @torch.no_grad()
    def _follow(self, x: torch.Tensor, chosen: torch.Tensor) -> None:
        self.sizes.mul_(self.decay).add_(chosen.sum(0), alpha=1 - self.decay)
        self.sums.mul_(self.decay).add_(chosen.t() @ x, alpha=1 - self.decay)
        self.codes.copy_(self.sums / (self.sizes + 1e-5)[:, None])
        self.seen += 1


class VectorQuantized(nn.Module):
    """A quantised autoencoder, with codes that every microbatch moves."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.ReLU(), nn.Conv2d(16, 8, 1))
        self.quantizer = Quantizer(12, 8)
        self.decoder = nn.Sequential(
            nn.Conv2d(8, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 48, 1),
            nn.PixelShuffle(4),
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
        h = self.encoder(x).permute(0, 2, 3, 1)
        quantized, distance, chosen = self.quantizer(h)
        image = self.decoder(quantized.permute(0, 3, 1, 2))
        return F.mse_loss(image, x) + 0.25 * distance, {"image": image, "chosen": chosen}


class RunningNorm(nn.Module):
    """A norm by running statistics alone, clipped as reinforcement learning has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("variance", torch.ones(width))
        self.register_buffer("count", torch.tensor(1e-4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            mean, variance, count = x.mean(0).detach(), x.var(0).detach(), x.shape[0]
            total = self.count + count
            apart = mean - self.mean
            both = self.variance * self.count + variance * count
            self.variance = (both + apart.square() * self.count * count / total) / total
            self.mean = self.mean + apart * count / total
            self.count = total
        return ((x - self.mean) / (self.variance + 1e-8).sqrt()).clamp(-5, 5)


class ActorCritic(nn.Module):
    """A policy and a value on one trunk; the observations' statistics run along."""

    def __init__(self) -> None:
        super().__init__()
        self.normalise = RunningNorm(WIDTH)
        self.trunk = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.policy, self.value = nn.Linear(32, CLASSES), nn.Linear(32, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor | Tensors]:
        h = self.trunk(self.normalise(x))
        odds = self.policy(h).log_softmax(-1)
        value = self.value(h).squeeze(-1)
        chosen = odds.gather(1, y[:, None]).squeeze(1)
        entropy = -(odds.exp() * odds).sum(-1).mean()
        advantage = (x.mean(-1) - value).detach()
        losses = {"policy": -(chosen * advantage).mean(), "value": value.square().mean()}
        total = losses["policy"] + 0.5 * losses["value"] - 0.01 * entropy
        return {"loss": total, "losses": losses, "heads": {"odds": odds, "value": value}}


class MessagePassing(nn.Module):
    """Nodes that send along the edges of each sample's own graph."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(2))
        self.update = nn.ModuleList(Mixer.mlp(WIDTH) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor, y: torch.Tensor) -> Tensors:
        source, target = (e[..., None].expand(-1, -1, WIDTH) for e in edges.unbind(1))
        h = nodes
        for message, update, norm in zip(self.message, self.update, self.norms):
            ends = torch.cat([h.gather(1, source), h.gather(1, target)], dim=-1)
            arrived = torch.zeros_like(h).scatter_add(1, target, torch.relu(message(ends)))
            h = norm((h + update(arrived)).transpose(1, 2)).transpose(1, 2)
        score = self.head(h.amax(dim=1)).squeeze(-1)
        return {"loss": F.huber_loss(score, y), "score": score}


class Recommender(nn.Module):
    """A table for every field, their products beside a deep part."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(7, 8, max_norm=None) for _ in range(3))
        self.wide = nn.Linear(4, 1)
        self.deep = nn.Sequential(
            nn.Linear(28, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1)
        )

    def forward(self, fields: torch.Tensor, counts: torch.Tensor, y: torch.Tensor) -> Tensors:
        parts = [table(fields[:, i]) for i, table in enumerate(self.tables)]
        stacked = torch.stack(parts, dim=1)
        pairs = 0.5 * (stacked.sum(1).square() - stacked.square().sum(1)).sum(-1)
        logit = self.deep(torch.cat([*parts, counts], dim=1)) + self.wide(counts)
        logit = logit.squeeze(-1) + pairs
        return {"loss": F.binary_cross_entropy_with_logits(logit, y), "logit": logit}
