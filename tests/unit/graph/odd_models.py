"""Small models that do what models do: write in place, share, detach, cast, return anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH = 8


class Layers(nn.Module):
    """Three linear layers; subclasses say what is done with them."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)
        self.c = nn.Linear(WIDTH, WIDTH)


class Mlp(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.b(torch.relu(self.a(x))))).pow(2).mean()


class InPlaceActivation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = [(WIDTH, 16), (16, WIDTH)] * 2
        self.layers = nn.ModuleList(nn.Linear(*size) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = functional.relu(layer(x), inplace=True)
        return x.pow(2).mean()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        out += x
        return self.relu(out)


class ResNet(nn.Module):
    """Skips, in-place additions and activations, running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.layers = nn.Sequential(*(Block(WIDTH) for _ in range(3)))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(torch.relu_(self.stem(x)))
        return self.head(x.mean((2, 3))).pow(2).mean()


class UNet(nn.Module):
    """A long skip."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.down2 = nn.Conv2d(WIDTH, 16, 3, 2, padding=1)
        self.middle = nn.Conv2d(16, 16, 3, padding=1)
        self.up = nn.ConvTranspose2d(16, WIDTH, 2, 2)
        self.out = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skip = torch.relu(self.down1(x))
        deep = torch.relu(self.middle(torch.relu(self.down2(skip))))
        return self.out(torch.cat([skip, torch.relu(self.up(deep))], 1)).pow(2).mean()


class WrittenBufferOfOnes(Layers):
    """A tensor of the model's own, into whose parts activations are written, read much later."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        parts = torch.zeros(x.shape[0], 2, WIDTH)
        parts[:, 0] = first
        parts[:, 1] = first * 2
        h = self.c(torch.relu(self.b(torch.relu(parts.sum(1)))))
        return (h + parts.mean(1)).pow(2).mean()


class WrittenColumn(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x[:, 0] = 1.0
        x.mul_(2)
        h = self.c(torch.relu(self.b(torch.relu(self.a(x)))))
        return (h * x).mean()


class ShiftedLabels(nn.Module):
    """What encoder-decoders do to their labels: written in place, of the batch alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)
        self.a = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 20)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        shifted = labels.new_zeros(labels.shape)
        shifted[..., 1:] = labels[..., :-1].clone()
        shifted[..., 0] = 3
        shifted.masked_fill_(shifted == -100, 0)
        h = self.a(torch.relu(self.embed(input_ids))) + self.embed(shifted)
        scores = self.head(torch.relu(h))
        return functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


class Counter(Layers):
    """Buffers that are assigned, added to, and read before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(WIDTH))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * (self.count + 1)
        self.count += 1
        self.mean = self.mean * 0.9 + x.mean(0) * 0.1
        h = self.c(torch.relu(self.b(torch.relu(h * self.mean))))
        return (h * self.count).pow(2).mean()


class InnerCounter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Counter()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * 2


class ViewedParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH * WIDTH))
        self.v = nn.Parameter(torch.randn(WIDTH * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(x @ self.w.view(WIDTH, WIDTH))
        return (h @ self.v.view(WIDTH, WIDTH).t()).pow(2).mean()


class SharedModule(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.relu(self.a(x))
        return self.b(x).pow(2).mean()


class Frozen(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.a.requires_grad_(False)
        self.b.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.b(torch.relu(self.a(x))))).pow(2).mean()


class Unused(Layers):
    def forward(self, x: Tensor) -> Tensor:
        self.c(x)
        return self.b(torch.relu(self.a(x))).pow(2).mean()


class ComplexValues(Layers):
    def forward(self, x: Tensor) -> Tensor:
        z = torch.fft.fft(self.a(x))
        weight = torch.view_as_complex(self.b.weight.view(WIDTH, WIDTH // 2, 2))
        z = (z @ weight) * 2
        return self.c(torch.cat([z.real, z.imag], -1)).pow(2).mean()


class IntegersCross(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        best = h.argmax(-1)
        h = self.c(torch.relu(self.b(torch.relu(h))))
        return h.gather(1, best[:, None]).mean()


class WithoutGradient(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with torch.no_grad():
            target = self.b(h).relu()
            scale = target.mean() + 1
        return ((self.c(h) - target) ** 2).mean() * scale


class Autocast(Layers):
    """Half precision inside, none further inside, one weight used twice."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            t = self.b(torch.relu(self.b(h)))
            with torch.autocast("cpu", enabled=False):
                u = self.c(t.float())
            v = torch.einsum("bi,ij->bj", t, self.c.weight)
        return ((h - v.float() * u) ** 2).mean()


class Checkpointed(Layers):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        h = checkpoint(lambda y: torch.relu(self.b(y)), h, use_reentrant=self.reentrant)
        return self.c(h).pow(2).mean()


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class CheckpointedColumn(Layers):
    """Reentrant around columns and what weights have not touched: eager code trains none of it."""

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(lambda y, scale: torch.relu(self.a(y)) * scale, x, 2.0, use_reentrant=True)
        h = x + checkpoint(self.b, h, use_reentrant=True)
        h = checkpoint(lambda y: torch.relu(self.c(y)), self.c(h), use_reentrant=True)
        return (h + checkpoint(self.b, x.clone(), use_reentrant=False)).pow(2).mean()


class StraightThrough(torch.autograd.Function):
    """A sign whose gradient passes as if it were not there, scaled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return torch.sign(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.scale, None


class OwnBackward(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(StraightThrough.apply(self.a(x), 3.0)).pow(2).mean()


straight_through = StraightThrough.apply


class OwnBackwardByAnotherName(Layers):
    """A function's `apply` bound to a name, as torch's tutorial has it; and its forward alone."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(straight_through(self.a(x), 3.0)).pow(2).mean()


class LentType(Layers):
    """A slice that lends nothing but its type to a table made without autocast, as a rotary's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scales", torch.linspace(1, 2, WIDTH))

    @torch.autocast("cuda", enabled=False)
    def table(self, like: Tensor) -> Tensor:
        return self.scales.to(like) * 2

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return (self.b(h) * self.table(h[:, 1:])).pow(2).mean()


class ReshapesInput(Layers):
    """Changes the shape of its own input in place, which the batch's own tensor must not get."""

    def forward(self, x: Tensor) -> Tensor:
        x.t_()
        rows = x.t().relu()
        x.t_().unsqueeze_(0)
        return self.b(self.a(x) + rows).pow(2).mean()


class PlainTensors(Layers):
    """Tensors that are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.tensor(2.0)
        self.tables = [torch.linspace(0, 1, WIDTH), torch.linspace(1, 2, WIDTH)]

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x) + self.tables[0]) * self.scale
        return (self.b(h) * self.tables[1]).pow(2).mean()


class PlainArguments(Layers):
    def forward(
        self, x: Tensor, mask: Tensor | None = None, act: bool = True, k: int = 3
    ) -> Tensor:
        h = self.a(x) * k
        if mask is not None:
            h = h * mask
        return self.b(torch.relu(h) if act else h).pow(2).mean()


class DerivedFirst(Layers):
    def forward(self, x: Tensor) -> Tensor:
        mask = (x > 0).float()
        places = torch.arange(WIDTH).float() * 2
        weights = torch.stack([mask.sum(-1), mask.mean(-1)]).sum(0)
        return (self.b(torch.relu(self.a(x * places))) * mask * weights[:, None]).mean()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(x[:, None])
        return self.out(hidden).pow(2).mean()


class Normalised(nn.Module):
    """Weights made of others in every forward, with a buffer written under no_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.b = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x))).pow(2).mean()


class Bounded(nn.Module):
    """A weight whose buffers are results of `out=` under no_grad, and are read outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x))).pow(2).mean()


class DataAttributes(Layers):
    """Reads `.data` of weights and of what it computes, and writes into that of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x)) / self.a.weight.data.norm()
        self.mean.data.mul_(0.9).add_(h.data.mean(0), alpha=0.1)
        h = self.b(h - self.mean) + h.data
        return self.c(h).pow(2).mean()


class Chunks(Layers):
    def forward(self, x: Tensor) -> Tensor:
        left, right = self.a(x).chunk(2, -1)
        rows = torch.unbind(self.b(torch.relu(torch.cat([right, left], -1))), 0)
        return self.c(torch.stack(rows[::-1])).pow(2).mean()


class NumberOfTheBatch(Layers):
    """A plain number that the batch decides."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x) * x.max().item())).pow(2).mean()


class Everything(Layers):
    """Outputs of all kinds, some made by no segment."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.b(torch.relu(self.a(x)))
        return {
            "loss": h.mean(),
            "again": h.mean(),
            "x": x,
            "doubled": x * 2,
            "weight": self.a.weight,
            "places": torch.arange(3),
            "h": h,
            "view": h.view(-1),
            "nested": (h * 2, {"deep": x + 1}),
            "nothing": None,
            "number": 3,
        }


class LossTwice(Layers):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        loss = self.b(torch.relu(self.a(x))).pow(2).mean()
        return loss, loss


@dataclass
class Output:
    loss: Tensor
    hidden: tuple[Tensor, Tensor]
    number: int = 3


class DataclassOutput(Layers):
    def forward(self, x: Tensor) -> Output:
        h = self.a(x)
        g = self.b(torch.relu(h))
        return Output(g.pow(2).mean(), (h, g))


class PassedThrough(Layers):
    """Tensors that a function without gradient gives back as they are keep theirs."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with torch.no_grad():
            same = h.to(h.dtype).contiguous()
            chosen = self.c(same).argmax(dim=-1)
        g = self.b(same) * chosen.unsqueeze(-1)
        with torch.no_grad():
            scale = g.abs().amax()
            g.mul_(0.5)
        return (g / scale).pow(2).mean()


class ParameterIsLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.value


def rows() -> dict[str, Tensor]:
    return {"x": torch.randn(4, WIDTH)}


def images() -> dict[str, Tensor]:
    return {"x": torch.randn(2, 3, 8, 8)}


def tokens() -> dict[str, Tensor]:
    return {name: torch.randint(20, (2, 5)) for name in ("input_ids", "labels")}


BATCHES = {
    **dict.fromkeys((ResNet, UNet), images),
    **dict.fromkeys((ShiftedLabels,), tokens),
}
"""Makes a model's batch; `rows` where it is not here."""

TRAINABLE: tuple[type[nn.Module], ...] = (
    Mlp, InPlaceActivation, ResNet, UNet, WrittenBufferOfOnes, WrittenColumn, ShiftedLabels,
    Counter, InnerCounter, ViewedParameters, SharedModule, Frozen, Unused, ComplexValues,
    IntegersCross, WithoutGradient, Autocast, Checkpointed, CheckpointedReentrant,
    CheckpointedColumn, OwnBackward,
    OwnBackwardByAnotherName, ReshapesInput, LentType,
    PlainTensors, PlainArguments, DerivedFirst, Recurrent, Normalised, Bounded, Chunks,
    NumberOfTheBatch, DataAttributes,
    Everything, LossTwice, DataclassOutput, ParameterIsLoss,
    PassedThrough,
)  # fmt: skip
