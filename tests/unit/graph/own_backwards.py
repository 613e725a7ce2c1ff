"""Autograd functions with a backward of their own: some see the size of what they are given."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

THREE = torch.tensor(3.0)


class Passing(Function):
    """A sign; the gradient passes as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.sign(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Reversed(Function):
    """Reverses the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.neg() * ctx.scale, None


class Doubled(Function):
    """Doubles the gradient, in a copy into which it writes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.relu(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clone().mul_(2.0)


class Filled(Function):
    """Uses tensors of the operand's shape, and constants."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.where(x > 0, x, x.new_zeros(x.shape)) * THREE + torch.full_like(x, 0.5)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x > 0) * torch.tensor(3.0)


class Clipped(Function):
    """Clips the gradient: that of a sum is not the sum of those of its parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-0.01, 0.01) + gradient.sign() * 0.003


class TwoResults(Function):
    """Two results, of which the second one alone is told its size in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.numel = x.numel()
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> Tensor | None:
        if first is None:
            return None if second is None else second / ctx.numel
        return first if second is None else first + second


class SizeInForward(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x / math.sqrt(x.numel())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class SizeInBackward(Function):
    """The gradient of learned step sizes is scaled so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.round(x * 8) / 8

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient / math.sqrt(x.numel())


class LastSize(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.factor = x.shape[-1] ** -0.5
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.factor


class FirstSize(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x / x.shape[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / gradient.shape[0]


class SizeInATensor(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x / torch.tensor(float(x.numel()))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class SizeInANewTensor(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x / x.new_tensor(float(x.numel()))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class SizeInAFill(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * torch.full(x.shape, float(x.shape[-1]), device=x.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class SizeDecides(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.tanh(x) if x.shape[-1] > 20 else torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class SizeDecidesWhichTensor(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        double, triple = x * 2, x * 3
        return double + (double if x.stride(0) > 20 else triple)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class SizeDecidesWhatIsReturned(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        double, triple = x * 2, x * 3
        return double if x.numel() > 100 else triple

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Counting(Function):
    """Does something else at every call."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Counting.calls += 1
        return x * (1 + 1 / Counting.calls)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


COUNT = torch.tensor(0.0)


class CountingInATensor(Function):
    """Counts its calls in a tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * COUNT.add_(1.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Noisy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Normed(Function):
    """Divides the gradient by its norm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / (gradient.norm() + 1e-6)


class Placed(Function):
    """Adds the number of every place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.arange(x.numel(), device=x.device).view(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


EVERYWHERE = (Passing, Filled, Clipped)
"""They compute every element by itself, whatever the size."""

LAST = (SizeInForward, SizeInBackward, LastSize, SizeInATensor, SizeInANewTensor, SizeInAFill)
NOWHERE = (
    *LAST,
    SizeDecides,
    SizeDecidesWhichTensor,
    SizeDecidesWhatIsReturned,
    TwoResults,
    Counting,
    Noisy,
    Normed,
    Placed,
)
"""They do something else on a part of the last dim."""


class Block(nn.Module):
    """A function between two layers that tensor parallelism splits."""

    def __init__(self, function: type[Function], width: int = 8) -> None:
        super().__init__()
        self.function = function
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        made: Any = self.function.apply(self.up(self.norm(x)))  # type: ignore[no-untyped-call]
        made = made[0] * made[1] if isinstance(made, tuple) else made
        return x + self.down(torch.tanh(made))


class Layers(nn.Module):
    """Blocks with a function each."""

    def __init__(self, function: type[Function]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(function) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class EarlyReaders(nn.Module):
    """A function's result, and what it is made from, enter split layers side by side."""

    def __init__(self, function: type[Function] = Clipped, width: int = 8) -> None:
        super().__init__()
        self.function = function
        self.stem = nn.Linear(width, width)
        self.ups = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(3))
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        clipped: Any = self.function.apply(x.sin())  # type: ignore[no-untyped-call]
        gate, first, second = self.ups
        made = torch.sigmoid(gate(clipped)) * first(x.cos()) + second(clipped * x)
        return (x + self.down(made)).square().mean()


class QuantisedBlock(nn.Module):
    """A layer whose weight passes through a function, between others."""

    def __init__(self, function: type[Function], width: int = 8) -> None:
        super().__init__()
        self.function = function
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.function.apply(self.up.weight)  # type: ignore[no-untyped-call]
        return x + self.down(torch.tanh(nn.functional.linear(x, weight, self.up.bias)))


class QuantisedWeights(nn.Module):
    """Blocks whose weights pass through a function."""

    def __init__(self, function: type[Function] = Clipped) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(QuantisedBlock(function) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()
