"""Plain models that return, share, write and combine things in all the ways that PyTorch has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.zoo.plain.batches import CLASSES, WIDTH, Tensors
from tests.zoo.plain.images import Mixer


@dataclass
class Answer:
    loss: torch.Tensor
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]
    name: str = "answer"


class Dataclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Answer:
        hidden = [x]
        for block in self.blocks:
            hidden.append(torch.tanh(block(hidden[-1])))
        logits = self.head(hidden[-1])
        return Answer(F.cross_entropy(logits, y), logits, tuple(hidden))


class Pair(NamedTuple):
    loss: torch.Tensor
    parts: dict[str, torch.Tensor]


class NamedTuples(Dataclass):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Pair:  # type: ignore[override]
        answer = super().forward(x, y)
        return Pair(answer.loss, {"logits": answer.logits, "first": answer.hidden[1]})


class Shared(nn.Module):
    """One block used three times, and a head that is the input layer's transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 32)
        self.block = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU())
        self.between = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.block(self.inner(x))
        h = self.block(self.between(h) + h)
        h = self.block(self.between(h) + h)
        return F.cross_entropy(F.linear(h, self.inner.weight.t()), y)


class Experts(nn.Module):
    """A mixture of experts with a choice that depends on the numbers, and a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 4)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Tensors:
        h = torch.relu(self.inner(x))
        scores = self.router(h).softmax(dim=-1)
        weights, chosen = scores.topk(2, dim=-1)
        parts = torch.einsum("bi,bkio->bko", h, self.experts[chosen])
        h = h + (parts * weights.unsqueeze(-1)).sum(dim=1)
        balance = scores.mean(dim=0).square().sum()
        return {"loss": F.cross_entropy(self.head(h), y) + 0.1 * balance, "balance": balance}


class InPlace(nn.Module):
    """Writes into slices, through views, and into what it has just made."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x[:, 0] = 0.0
        h = self.first(x)
        canvas = torch.zeros_like(h)
        canvas[:, : WIDTH // 2] = torch.tanh(h[:, : WIDTH // 2])
        canvas[:, WIDTH // 2 :].copy_(h[:, WIDTH // 2 :]).mul_(0.5)
        h = self.second(canvas)
        h.add_(canvas).clamp_(-2, 2)
        even = h.view(-1, WIDTH // 2, 2)
        even[..., 0] *= 2
        return F.cross_entropy(self.head(h), y)


class Frozen(nn.Module):
    """A frozen trunk, a part without gradient, a parameter that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).requires_grad_(False)
        self.adapter = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Parameter(torch.ones(3))
        self.teacher = nn.Linear(WIDTH, CLASSES)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.adapter(self.trunk(x)) + x
        with torch.no_grad():
            target = self.teacher(h).softmax(dim=-1)
        logits = self.head(torch.tanh(h))
        return F.cross_entropy(logits, y) + F.kl_div(
            logits.log_softmax(dim=-1), target, reduction="batchmean"
        )


class Spectral(nn.Module):
    """Complex numbers across the cuts, some of them only marked as conjugated."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.filters = nn.Parameter(torch.randn(2, WIDTH // 2 + 1, 2) / 4)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(torch.tanh(self.first(x))).conj()
        for weight in torch.view_as_complex(self.filters):
            spectrum = spectrum * weight
        mixed = self.second(torch.fft.irfft(spectrum, n=WIDTH))
        return F.cross_entropy(self.head(mixed + spectrum.real.mean(dim=-1, keepdim=True)), y)


class Contrastive(nn.Module):
    """Two towers, and a loss over all pairs of a microbatch; a learnt scale, a running buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, 8))
        self.right = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, 8))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("average", torch.zeros(8))

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> Tensors:
        left, right = F.normalize(self.left(a), dim=-1), F.normalize(self.right(b), dim=-1)
        self.average = 0.9 * self.average + 0.1 * left.detach().mean(dim=0)
        scores = self.scale.exp() * left @ right.t()
        target = torch.arange(len(a), device=a.device)
        loss = (F.cross_entropy(scores, target) + F.cross_entropy(scores.t(), target)) / 2
        return {"loss": loss, "scores": scores}


class Highway(nn.Module):
    """Two residual streams, python control flow, chunks and stacks, whole-number arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.right = nn.ModuleDict({str(i): nn.Linear(WIDTH, WIDTH) for i in range(3)})
        self.head = nn.Bilinear(WIDTH, WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        one = two = x
        for i, left in enumerate(self.left):
            one, two = two + torch.sin(left(one)), one * torch.sigmoid(self.right[str(i)](two))
            if i % 2:
                one, two = torch.stack([two, one]).unbind()
        shifted = torch.where(y + 1 >= CLASSES, torch.zeros_like(y), y + 1)
        logits = self.head(one, two)
        return [F.cross_entropy(logits, shifted), logits, y // 2]


class Checkpointed(nn.Module):
    """Recomputes its blocks by itself, in both ways that torch has."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Mixer.mlp(WIDTH) for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for i, block in enumerate(self.blocks):
            x = x + checkpoint(block, x, use_reentrant=i == 1)
        return F.cross_entropy(self.head(self.norm(x)), y)


class Regressor(nn.Module):
    """Gives predictions alone: its loss is somebody else's."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.PReLU()) for _ in range(3)]
        self.body = nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        return out


def focal(outputs: Any, batch: Tensors) -> torch.Tensor:
    """A loss of one's own."""
    log_probability = -F.cross_entropy(outputs, batch["y"], reduction="none")
    loss: torch.Tensor = -((1 - log_probability.exp()) ** 2 * log_probability).mean()
    return loss
