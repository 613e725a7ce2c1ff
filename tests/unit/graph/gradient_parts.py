"""Models that take gradients in their forward in ways that no operators can stand for."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.unit.graph.gradient_models import WIDTH, Classifier, layers


class Doubled(nn.Module):
    """An energy of which no trace can follow the code."""

    def __init__(self) -> None:
        super().__init__()
        self.net = layers(nn.SiLU)

    def forward(self, x: Tensor) -> Tensor:
        energy: Tensor = self.net(x).sum(1)
        return 2 * energy if energy.mean() > 0 else energy


class Slopes(nn.Module):
    """The energy's slope, in a part of the model of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = Doubled()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.energy(x)
            slope = torch.autograd.grad(energy.sum(), x, create_graph=True)[0]
        return energy, slope


class Batched(nn.Module):
    """Several gradients at once."""

    def __init__(self) -> None:
        super().__init__()
        self.net = layers(nn.SiLU, out=2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.requires_grad_()
            y = self.net(x)
            along = torch.eye(2, dtype=y.dtype)[:, None].expand(2, *y.shape)
            (rows,) = torch.autograd.grad(y, x, along, is_grads_batched=True, create_graph=True)
        return rows.pow(2).sum((0, 2))


class Polluting(Classifier):
    """Its backward() also gives its own parameters a gradient, which it takes away again."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            self.cost(x, y).backward()
        self.zero_grad()
        assert x.grad is not None
        return self.cost(x.detach() + 0.1 * x.grad.sign(), y)


class Around(nn.Module):
    """A model with one of the above as a part."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first, self.part = nn.Linear(WIDTH, WIDTH), part

    def forward(self, x: Tensor, **others: Tensor) -> dict[str, Tensor]:
        made = self.part(self.first(x), **others)
        found = made if isinstance(made, tuple) else (made,)
        return {"loss": sum((one**2).mean() for one in found)}


class TopOfForward(nn.Module):
    """Takes a gradient where no module around it could be opaque."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.net, self.energy = kind, layers(), Doubled()
        self.still = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = x.requires_grad_()
        y = self.net(x)
        total = y.sum()
        if self.kind == "batched":
            along = torch.ones(2, *y.shape)
            total = torch.autograd.grad(y, x, along, is_grads_batched=True)[0].sum()  # batched
        elif self.kind == "parameters":
            total.backward(retain_graph=True)  # parameters
        elif self.kind == "attribute":
            assert self.net[0].weight.grad is None  # attribute
        elif self.kind == "through":
            energy = self.energy(x).sum()
            total = torch.autograd.grad(energy, x, create_graph=True)[0].sum()  # through
        elif self.kind == "thaws":
            self.still.requires_grad_(True)  # thaws
        else:
            self.net.requires_grad_(False)
        return {"loss": total + y.sum()}
