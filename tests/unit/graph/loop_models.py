"""Models whose code loops over the tokens of a sequence, channel by channel or head by head."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

WIDTH, STATES, HEADS, CLASSES = 16, 3, 4, 5


def selective_scan(
    x: torch.Tensor, rate: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
) -> torch.Tensor:
    """A state for every channel, as Mamba has it; the input and output maps are of all channels."""
    state = torch.zeros(x.shape[0], x.shape[2], a.shape[1], dtype=x.dtype, device=x.device)
    results = []
    for t in range(x.shape[1]):
        now = rate[:, t, :, None]
        state = torch.exp(now * a) * state + now * b[:, t, None, :] * x[:, t, :, None]
        results.append((state @ c[:, t, :, None]).squeeze(-1))
    return torch.stack(results, 1)


def delta_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, gate: torch.Tensor
) -> torch.Tensor:
    """A matrix for every head, as linear attention has it; fewer keys' heads than values'."""
    query, key = (
        each.repeat_interleave(value.shape[2] // each.shape[2], 2) for each in (query, key)
    )
    batch, tokens, heads, size = value.shape
    state = torch.zeros(batch, heads, key.shape[3], size, dtype=value.dtype, device=value.device)
    result = torch.zeros(value.shape, dtype=value.dtype, device=value.device)
    for t in range(tokens):
        found = key[:, t, :, None, :] @ state
        change = (value[:, t, :, None, :] - found) * gate[:, t, :, None, None]
        state = state + key[:, t, :, :, None] @ change
        result[:, t] = (query[:, t, :, None, :] @ state).squeeze(2)
    return result


def mixing_scan(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Every channel depends on all."""
    state, results = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = torch.tanh(state @ weight + x[:, t])
        results.append(state)
    return torch.stack(results, 1)


def scaled_scan(x: torch.Tensor) -> torch.Tensor:
    """Reads the number of channels, which is another one on a shard."""
    state, results = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = torch.tanh(0.5 * state + x[:, t] * x.shape[2] ** -0.5)
        results.append(state)
    return torch.stack(results, 1)


def counted_scan(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Is called with a number of heads, which is another one on a shard."""
    x = x.unflatten(2, (heads, -1))
    state, results = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = torch.tanh(0.5 * state + x[:, t] - x[:, t].mean(-1, keepdim=True))
        results.append(state)
    return torch.stack(results, 1).flatten(2)


class _Flipped(torch.autograd.Function):
    """Has a backward that is not its forward's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.flip(-1)


def own_backward_scan(x: torch.Tensor) -> torch.Tensor:
    """Mixes the channels in the backward alone."""
    state, results = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = torch.tanh(0.5 * state + _Flipped.apply(x[:, t]))  # type: ignore[no-untyped-call]
        results.append(state)
    return torch.stack(results, 1)


def branching_scan(x: torch.Tensor) -> torch.Tensor:
    """Mixes the channels behind the twelfth token."""
    state, results = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = torch.tanh(0.5 * state + x[:, t])
        if t > 12:
            state = state.flip(-1)
        results.append(state)
    return torch.stack(results, 1)


class Selective(nn.Module):
    """Projects into channels with a gate, scans, and projects back."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.rates = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.maps = nn.Linear(WIDTH, 2 * STATES)
        self.a = nn.Parameter(-torch.rand(WIDTH, STATES))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner, gate = self.into(x).chunk(2, -1)
        b, c = self.maps(x).chunk(2, -1)
        rate = functional.softplus(self.rates(x))
        return self.out(selective_scan(inner, rate, self.a, b, c) * functional.silu(gate))


class DeltaRule(nn.Module):
    """Linear attention with half as many heads of keys as of values."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.value, self.gate = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * HEADS)
        self.out = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key = (
            made.unflatten(-1, (HEADS, -1)).softmax(-1) for made in (self.query(x), self.key(x))
        )
        value = self.value(x).unflatten(-1, (2 * HEADS, -1))
        return self.out(delta_rule(query, key, value, self.gate(x).sigmoid()).flatten(2))


class _Around(nn.Module):
    """Projects, loops, and projects back."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.scan(self.into(x)))

    def scan(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Mixing(_Around):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4 * WIDTH, 4 * WIDTH) / 8)

    def scan(self, x: torch.Tensor) -> torch.Tensor:
        return mixing_scan(x, self.weight)


class Scaled(_Around):
    def scan(self, x: torch.Tensor) -> torch.Tensor:
        return scaled_scan(x)


class Counted(_Around):
    def scan(self, x: torch.Tensor) -> torch.Tensor:
        return counted_scan(x, HEADS)


class OwnBackward(_Around):
    def scan(self, x: torch.Tensor) -> torch.Tensor:
        return own_backward_scan(x)


class Branching(_Around):
    def scan(self, x: torch.Tensor) -> torch.Tensor:
        return branching_scan(x)


class Decaying(nn.Module):
    """Loops in its own forward, and has a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.rand(4 * WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, results = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = torch.tanh(self.decay * state + x[:, t])
            results.append(state)
        return torch.stack(results, 1)


class OwnLoop(_Around):
    """Calls a module that loops."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Decaying()

    def scan(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.inner(x)
        return made


class Block(nn.Module):
    """A norm and a mixer, beside the residual stream."""

    def __init__(self, mixer: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(WIDTH), mixer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mixer(self.norm(x))


class Blocks(nn.Module):
    """Blocks, a head and a loss."""

    def __init__(self, mixer: type[nn.Module], num_blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(mixer) for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            x = block(x)
        return {"loss": functional.cross_entropy(self.head(x).flatten(0, 1), y.flatten())}


def batch_of(tokens: int, step: int, samples: int) -> dict[str, torch.Tensor]:
    """The batch of a step."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(samples, tokens, WIDTH, generator=generator)
    return {"x": x, "y": torch.randint(CLASSES, (samples, tokens), generator=generator)}
