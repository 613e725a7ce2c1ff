"""Models that take gradients in their own forward, as people write them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH, CLASSES = 6, 3


def layers(act: type[nn.Module] = nn.Tanh, drop: float = 0.0, out: int = 1) -> nn.Sequential:
    """Layers of which torch knows the second derivatives; of a norm's, it has no third ones."""
    return nn.Sequential(
        nn.Linear(WIDTH, 8), act(), nn.Dropout(drop), nn.LayerNorm(8), nn.Linear(8, 8), act(),
        nn.Linear(8, out),
    )  # fmt: skip


class Penalised(nn.Module):
    """The critic of a WGAN-GP: its gradient at points between real and made samples has norm 1."""

    def __init__(self, critic: nn.Module | None = None) -> None:
        super().__init__()
        self.critic = critic or layers(nn.LeakyReLU)

    def forward(self, x: Tensor, other: Tensor) -> dict[str, Tensor]:
        part = torch.rand(x.shape[0], *(1,) * (x.ndim - 1), dtype=x.dtype)
        between = (part * x + (1 - part) * other).requires_grad_(True)
        score = self.critic(between)
        (slope,) = torch.autograd.grad(
            score, between, torch.ones_like(score), create_graph=True, retain_graph=True
        )
        penalty = ((slope.flatten(1).norm(2, dim=1) - 1) ** 2).mean()
        return {"loss": self.critic(other).mean() - self.critic(x).mean() + 10 * penalty}


class Images(nn.Module):
    """A critic with convolutions, norms and pooling, some of them in place."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU(inplace=True),
            nn.AvgPool2d(2), nn.Conv2d(4, 4, 3, stride=2), nn.InstanceNorm2d(4, affine=True),
            nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(x)
        return result


class Attends(nn.Module):
    """A critic with attention, without the kernels that have no second derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x[:, None] * torch.ones(4, 1, dtype=x.dtype)).chunk(3, -1)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.out(functional.gelu(y.mean(1)))
        return result


class Normed(nn.Module):
    """A critic with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(torch.sigmoid(self.norm(self.up(x))))
        return result


class Deep(nn.Module):
    """A critic of several blocks, and so of several segments."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        for block in self.blocks:
            x = x + block(x)
        result: Tensor = self.down(torch.tanh(x))
        return result


class Classifier(nn.Module):
    """What the attacks below train."""

    def __init__(self) -> None:
        super().__init__()
        self.net = layers(nn.GELU, out=CLASSES)

    def cost(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(self.net(x), y)


class FastAttack(Classifier):
    """FGSM: one step of the input along the sign of its gradient, which is a constant then."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        x = x.detach().requires_grad_()
        (slope,) = grad(self.cost(x, y), x)
        return {"loss": self.cost(x + 0.1 * slope.sign(), y), "slope": slope}


class AttentionAttack(nn.Module):
    """FGM: inputs of attention moved along a first derivative, which has no second one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(1, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 24) for _ in range(2))
        self.out = nn.Linear(8, CLASSES)

    def cost(self, h: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            q, k, v = block(h)[:, None].chunk(3, -1)
            h = h + functional.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]
        return functional.cross_entropy(self.out(h.mean(1)), y)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.embed(x[..., None])
        cost = self.cost(h, y)
        (slope,) = torch.autograd.grad(cost, [h], retain_graph=True)
        return cost + self.cost(h + (0.5 * slope / slope.norm()).detach(), y)


class GradAttribute(Classifier):
    """FGSM by backward() and .grad."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        x.requires_grad = True
        cost = self.cost(x, y)
        cost.backward(inputs=[x], retain_graph=True)
        self.cost(x, y).backward(inputs=[x])  # adds up
        assert x.grad is not None
        return {"loss": cost + self.cost(x.detach() + 0.1 * x.grad, y)}


class ProjectedAttack(Classifier):
    """PGD: several steps, in evaluation mode, on the way without gradients."""

    def attack(self, x: Tensor, y: Tensor) -> Tensor:
        moved = x.detach() + 0.001 * torch.randn(x.shape, dtype=x.dtype)
        for _ in range(2):
            with torch.enable_grad():
                moved = moved.detach().requires_grad_()
                cost = self.cost(moved, y)
                slope = torch.autograd.grad(cost, [moved])[0]
            with torch.no_grad():
                moved = moved + 0.02 * slope.sign()
                moved = torch.min(torch.max(moved, x - 0.05), x + 0.05)
        return moved.detach()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": self.cost(x, y) + self.cost(self.attack(x, y), y)}


class Balanced(nn.Module):
    """GradNorm: the gradients of two losses for a shared weight have one size."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.one, self.two = (
            nn.Linear(WIDTH, 8),
            nn.Linear(8, 1),
            nn.Linear(8, CLASSES),
        )
        self.weights = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.shared(x))
        losses = (self.one(hidden) ** 2).mean(), functional.cross_entropy(self.two(hidden), y)
        norms = torch.stack([
            grad(w * loss, self.shared.weight, retain_graph=True, create_graph=True)[0].norm()
            for w, loss in zip(self.weights, losses, strict=True)
        ])  # fmt: skip
        total = sum(w.detach() * loss for w, loss in zip(self.weights, losses, strict=True))
        return {"loss": total + (norms - norms.mean().detach()).abs().sum()}


class EveryParameter(Classifier):
    """A penalty on the gradient of all parameters, with one that takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        cost = self.cost(x, y)
        found = grad(cost, list(self.parameters()), create_graph=True, allow_unused=True)
        assert sum(g is None for g in found) == 1
        other = grad(cost, [self.idle], create_graph=True, materialize_grads=True)
        norms = sum((g**2).sum() for g in (*found, *other) if g is not None)
        return {"loss": cost + 0.1 * norms + (self.idle**2).sum()}


class Energy(nn.Module):
    """Forces from the energy of some particles."""

    def __init__(self) -> None:
        super().__init__()
        self.net = layers(nn.SiLU)
        self.embed = nn.Linear(1, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x.requires_grad_()
            apart = x[:, :, None] - x[:, None]
            distance = (apart.pow(2).sum(-1) + 1e-3).sqrt()
            energy = self.net(self.embed(distance[..., None]).tanh()).sum((1, 2, 3))
            forces = -torch.autograd.grad(energy.sum(), x, create_graph=self.training)[0]
        return energy, forces


class Molecules(nn.Module):
    """An energy model as a part, and the loss of both it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Energy()

    def forward(self, x: Tensor, energy: Tensor, forces: Tensor) -> dict[str, Tensor]:
        one, two = self.model(x)
        loss = functional.mse_loss(one, energy) + functional.mse_loss(two, forces)
        return {"loss": loss, "energy": one, "forces": two}


class Physics(nn.Module):
    """A PINN: derivatives of derivatives of derivatives."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)
        )

    def forward(self, x: Tensor, t: Tensor) -> dict[str, Tensor]:
        x, t = x.requires_grad_(), t.requires_grad_()
        u = self.net(torch.cat([x, t], 1))
        ones = torch.ones_like(u)
        u_x, u_t = torch.autograd.grad(u, (x, t), ones, create_graph=True)
        u_xx = torch.autograd.grad(u_x, x, ones, create_graph=True)[0]
        u_xxx = torch.autograd.grad(u_xx, x, ones, create_graph=True)[0]
        return {"loss": ((u_t + 6 * u * u_x + u_xxx) ** 2).mean() + (u**2).mean()}


class Curved(nn.Module):
    """torch.autograd.functional: a Jacobian, and products with a Hessian."""

    def __init__(self) -> None:
        super().__init__()
        self.net = layers()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        f = torch.autograd.functional
        rows = f.jacobian(lambda z: self.net(z).sum(0), x, create_graph=True)
        _, product = f.hvp(
            lambda z: self.net(z).pow(2).sum(), x, torch.ones_like(x), create_graph=True
        )
        return {"loss": (rows**2).mean() + (product**2).mean()}


class Transformed(nn.Module):
    """torch.func: one of its transforms."""

    def __init__(self, kind: str = "grad") -> None:
        super().__init__()
        self.net, self.kind = nn.Sequential(*layers()[:2], *layers()[4:]), kind

    def energy(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(x).pow(2).sum()
        return result

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        f: Any = torch.func
        if self.kind == "grad":
            found = f.grad(self.energy)(x)
        elif self.kind == "grad_and_value":
            found, value = f.grad_and_value(self.energy)(x)
            found = found * value
        elif self.kind == "vjp":
            value, pull = f.vjp(self.net, x)
            found = pull(value.cos())[0]
        elif self.kind == "jvp":
            found = f.jvp(self.net, (x,), (x.cos(),))[1]
        else:
            found = getattr(f, self.kind)(lambda z: self.net(z[None])[0])(x[0])
        return {"loss": (found**2).mean()}


class Adapted(Classifier):
    """MAML: the loss after a step of gradient descent on the parameters."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        parameters = dict(self.net.named_parameters())

        def cost(values: dict[str, Tensor]) -> Tensor:
            return functional.cross_entropy(torch.func.functional_call(self.net, values, (x,)), y)

        slopes = torch.func.grad(cost)(parameters)
        return {"loss": cost({n: p - 0.1 * slopes[n] for n, p in parameters.items()})}


class Recomputed(nn.Module):
    """A gradient through what is checkpointed, for a tensor on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.net = nn.Linear(WIDTH, WIDTH), layers()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.first(x).exp()
        score = checkpoint(self.net, hidden, use_reentrant=False)
        slopes = torch.autograd.grad(score.sum(), (hidden, self.first.weight), create_graph=True)
        return {"loss": sum((s**2).sum() for s in slopes) + score.mean()}


class Sampled(nn.Module):
    """An energy-based model: samples that walk downhill while the parameters stand still."""

    def __init__(self) -> None:
        super().__init__()
        self.net = layers(nn.SiLU)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for parameter in self.net.parameters():
            parameter.requires_grad = False
        made = torch.autograd.Variable(x.clone(), requires_grad=True)
        for _ in range(2):
            made = made.detach().requires_grad_()
            self.net(made).sum().backward()
            assert made.grad is not None
            made = made - 0.1 * made.grad
        still = self.net(x.tanh()).mean()  # trains nothing
        self.net.requires_grad_(True)
        return {"loss": self.net(x).mean() - self.net(made.detach()).mean() + still}


class _Scaled(torch.autograd.Function):
    """x · sigmoid(x) with a backward that is not its derivative, and saves what it computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        part = x.sigmoid()
        ctx.save_for_backward(x, part)
        return x * part

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, part = ctx.saved_tensors
        result: Tensor = -gradient * part * x
        return result


class Scaled(nn.Module):
    """A gradient through an autograd function."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        score = self.second(_Scaled.apply(self.first(x.requires_grad_())))
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return {"loss": (slope**2).mean() + score.mean()}


class Edited(nn.Module):
    """A gradient through writes in place, and one that a tensor on the way retains."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.net = nn.Linear(WIDTH, WIDTH), layers()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        leaf = x.clone().requires_grad_()
        hidden = self.first(leaf) * 2
        hidden[:, 0] = 0
        hidden.add_(x).relu_()
        hidden.retain_grad()
        self.net(hidden).sum().backward(inputs=[leaf], retain_graph=True)
        assert leaf.grad is not None and hidden.grad is not None
        return {"loss": (self.net(x + leaf.grad) * self.net(hidden + hidden.grad)).mean()}
