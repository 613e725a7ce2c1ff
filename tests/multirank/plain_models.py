"""Everyday PyTorch models, as people write them: each takes its columns and gives its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

Tensors = dict[str, torch.Tensor]
CLASSES, WIDTH, LENGTH = 5, 16, 6


def images(samples: int, generator: torch.Generator) -> Tensors:
    x = torch.randn(samples, 3, 16, 16, generator=generator)
    return {"x": x, "y": torch.randint(CLASSES, (samples,), generator=generator)}


def masks(samples: int, generator: torch.Generator) -> Tensors:
    x = torch.randn(samples, 3, 16, 16, generator=generator)
    return {"x": x, "y": torch.randint(2, (samples, 16, 16), generator=generator)}


def tokens(samples: int, generator: torch.Generator) -> Tensors:
    x = torch.randint(11, (samples, LENGTH), generator=generator)
    return {"x": x, "y": torch.randint(11, (samples, LENGTH), generator=generator)}


def vectors(samples: int, generator: torch.Generator) -> Tensors:
    x = torch.randn(samples, WIDTH, generator=generator)
    return {"x": x, "y": torch.randint(CLASSES, (samples,), generator=generator)}


def tokens_with_masks(samples: int, generator: torch.Generator) -> Tensors:
    lengths = torch.randint(2, LENGTH + 1, (samples, 1), generator=generator)
    keep = torch.arange(LENGTH) < lengths  # a boolean column
    weight = torch.rand(samples, generator=generator)
    return {**tokens(samples, generator), "keep": keep, "weight": weight}


def two_views(samples: int, generator: torch.Generator) -> Tensors:
    a = torch.randn(samples, WIDTH, generator=generator)
    return {"a": a, "b": torch.randn(samples, WIDTH, generator=generator)}


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


class Recurrent(nn.Module):
    def __init__(self, cell: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.rnn = getattr(nn, cell)(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Tensors:
        out, _ = self.rnn(self.embed(x))
        logits = self.head(out)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), y.flatten()), "logits": logits}


class LSTM(Recurrent):
    def __init__(self) -> None:
        super().__init__("LSTM")


class GRU(Recurrent):
    def __init__(self) -> None:
        super().__init__("GRU")


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


class CausalAttention(nn.Module):
    """As nanoGPT has it: a mask in a buffer, one matrix for query, key and value."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("bias", torch.tril(torch.ones(8, 8)).view(1, 1, 8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.size()
        q, k, v = (
            h.view(b, t, 4, c // 4).transpose(1, 2) for h in self.c_attn(x).split(WIDTH, dim=2)
        )
        att = (q @ k.transpose(-2, -1)) * (1.0 / k.size(-1) ** 0.5)
        att = att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class NanoGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(11, WIDTH), nn.Embedding(8, WIDTH)
        self.attention = nn.ModuleList(CausalAttention() for _ in range(2))
        self.mlp = nn.ModuleList(Mixer.mlp(WIDTH) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(5))
        self.lm_head = nn.Linear(WIDTH, 11, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pos = torch.arange(0, x.size(1), dtype=torch.long, device=x.device)
        h = self.wte(x) + self.wpe(pos)
        for i, (attention, mlp) in enumerate(zip(self.attention, self.mlp)):
            h = h + attention(self.norms[2 * i](h))
            h = h + mlp(self.norms[2 * i + 1](h))
        logits = self.lm_head(self.norms[4](h))
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1))
        return loss, logits


class Transformer(nn.Module):
    """torch's own encoder layers, with a boolean padding mask and weights of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 11)

    def forward(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        keep: torch.Tensor | None = None,
        weight: torch.Tensor | None = None,
    ) -> torch.Tensor:
        h = self.encoder(self.embed(x), src_key_padding_mask=None if keep is None else ~keep)
        each = F.cross_entropy(self.head(h).transpose(1, 2), y, reduction="none").mean(dim=1)
        return (each if weight is None else each * weight).mean()


class EncoderDecoder(nn.Module):
    """Every layer of the decoder reads what the encoder made."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.core = nn.Transformer(WIDTH, 2, 2, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        target = torch.cat([torch.zeros_like(y[:, :1]), y[:, :-1]], dim=1)
        mask = nn.Transformer.generate_square_subsequent_mask(y.size(1), device=x.device)
        h = self.core(self.embed(x), self.embed(target), tgt_mask=mask, tgt_is_causal=True)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


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


MODELS: Mapping[type[nn.Module], Callable[[int, torch.Generator], Tensors]] = {
    ResNet: images,
    UNet: masks,
    LSTM: tokens,
    GRU: tokens,
    Mixer: images,
    NanoGPT: tokens,
    Transformer: tokens_with_masks,
    EncoderDecoder: tokens,
    Dataclass: vectors,
    NamedTuples: vectors,
    Shared: vectors,
    Experts: vectors,
    InPlace: vectors,
    Frozen: vectors,
    Spectral: vectors,
    Contrastive: two_views,
    Diffusion: images,
    Highway: vectors,
    Checkpointed: vectors,
    Regressor: vectors,
}
"""The models, and how their batches are drawn."""
LOSSES = {Regressor: focal}
