"""Small optimizers of the literature; the updates of most depend on more than single elements."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class Each(torch.optim.Optimizer):
    """Steps every parameter by itself, by the `update` of its gradient and state."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * self.update(p, p.grad, self.state[p], group))

    def update(self, p: Any, g: torch.Tensor, state: Any, group: Any) -> torch.Tensor:
        raise NotImplementedError


def adam(g: torch.Tensor, state: Any) -> torch.Tensor:
    """Adam's direction, without correction of its bias."""
    for key, value, beta in (("exp_avg", g, 0.9), ("exp_avg_sq", g * g, 0.99)):
        state[key] = state[key].lerp(value, 1 - beta) if key in state else (1 - beta) * value
    direction: torch.Tensor = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-8)
    return direction


class Lion(Each):
    """arXiv:2302.06675: the sign of a momentum, the only state."""

    def update(self, p: Any, g: torch.Tensor, state: Any, group: Any) -> torch.Tensor:
        before = state.get("exp_avg", torch.zeros_like(p))
        state["exp_avg"] = before.lerp(g, 0.01)
        return before.lerp(g, 0.1).sign()


class Lamb(Each):
    """arXiv:1904.00962: Adam's direction in the length of the parameter."""

    def update(self, p: Any, g: torch.Tensor, state: Any, group: Any) -> torch.Tensor:
        direction = adam(g, state)
        return direction * (p.norm() / (direction.norm() + 1e-12))


class Lars(Each):
    """arXiv:1708.03888: momentum of gradients in the length of the parameter."""

    def update(self, p: Any, g: torch.Tensor, state: Any, group: Any) -> torch.Tensor:
        rate = 0.02 * p.norm() / (g.norm() + 1e-3 * p.norm() + 1e-12)
        rate = torch.where((p.norm() > 0) & (g.norm() > 0), rate, 1.0)
        state["momentum"] = 0.9 * state.get("momentum", torch.zeros_like(p)) + rate * (g + 1e-3 * p)
        found: torch.Tensor = state["momentum"]
        return found


class NovoGrad(Each):
    """arXiv:1905.11286: the gradient by a moving norm of it."""

    def update(self, p: Any, g: torch.Tensor, state: Any, group: Any) -> torch.Tensor:
        square = g.square().sum()
        state["exp_avg_sq"] = torch.lerp(state.get("exp_avg_sq", square), square, 0.02)
        step = g / (state["exp_avg_sq"].sqrt() + 1e-8)
        state["exp_avg"] = 0.95 * state.get("exp_avg", torch.zeros_like(p)) + step
        found: torch.Tensor = state["exp_avg"]
        return found


class Muon(Each):
    """Orthogonalised momentum; exact, where torch's iterates in bfloat16."""

    def update(self, p: Any, g: torch.Tensor, state: Any, group: Any) -> torch.Tensor:
        assert p.dim() == 2, "Muon steps matrices alone"
        state["momentum"] = 0.9 * state.get("momentum", torch.zeros_like(p)) + g
        left, values, right = torch.linalg.svd(state["momentum"], full_matrices=False)
        return (left * (values / (values + 0.1 * values.max()))) @ right  # none where there is 0


class Shampoo(Each):
    """arXiv:1802.09568: preconditioned from both sides, where no dim is above `max_dim`."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, max_dim: int = 2048) -> None:
        super().__init__(params, lr, max_dim=max_dim)

    def update(self, p: Any, g: torch.Tensor, state: Any, group: Any) -> torch.Tensor:
        if p.dim() != 2 or max(p.shape) > group["max_dim"]:
            return adam(g, state)
        for side, matrix in (("left", g @ g.T), ("right", g.T @ g)):
            state[side] = state.get(side, 1e-4 * torch.eye(len(matrix)).to(matrix)) + matrix
        return inverse_root(state["left"]) @ g @ inverse_root(state["right"])


class Soap(Each):
    """arXiv:2409.11321: Adam in the eigenvectors of Shampoo's matrices."""

    def update(self, p: Any, g: torch.Tensor, state: Any, group: Any) -> torch.Tensor:
        if p.dim() != 2:
            return adam(g, state)
        if "left" not in state:
            state["left"], state["right"] = g @ g.T, g.T @ g
        state["left"] = state["left"].lerp(g @ g.T, 0.05)
        state["right"] = state["right"].lerp(g.T @ g, 0.05)
        left, right = (torch.linalg.eigh(state[side])[1] for side in ("left", "right"))
        return left @ adam(left.T @ g @ right, state) @ right.T


class Came(Each):
    """arXiv:2307.02047, without its confidence: factored second moments."""

    def update(self, p: Any, g: torch.Tensor, state: Any, group: Any) -> torch.Tensor:
        if p.dim() != 2:
            return adam(g, state)
        square = g * g + 1e-30
        for key, dim in (("row", 1), ("col", 0)):
            mean = square.mean(dim)
            state[key] = torch.lerp(state.get(key, mean), mean, 0.01)
        row, col = state["row"], state["col"]
        update = g * (row / row.mean()).rsqrt()[:, None] * col.rsqrt()
        found: torch.Tensor = update / update.square().mean().sqrt().clamp(min=1.0)
        return found


class Prodigy(torch.optim.Optimizer):
    """arXiv:2306.06101 in short: the rate is a distance estimated over all parameters."""

    def __init__(self, params: Iterable[Any], lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "d": 1e-6, "numerator": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            d, lr, length = group["d"], group["lr"], 0.0
            own = [p for p in group["params"] if p.grad is not None]
            for p in own:
                state = self.state[p]
                start = state.setdefault("p0", p.clone())
                group["numerator"] += d * float((p.grad * (start - p)).sum())
                state["s"] = state.get("s", torch.zeros_like(p)) + d * p.grad
                length += float(state["s"].abs().sum())
            group["d"] = max(d, group["numerator"] / max(length, 1e-30), d * 1.5)
            if length and group["numerator"] / length < d:
                group["d"] = d * (1.0 + 1.0 / (1.0 + length))
            for p in own:
                p.sub_(lr * group["d"] * p.grad.sign())


class StochasticRounding(Each):
    """Adds noise to what it steps."""

    def update(self, p: Any, g: torch.Tensor, state: Any, group: Any) -> torch.Tensor:
        return g + 1e-3 * torch.randn_like(g)


class Sam(torch.optim.Optimizer):
    """arXiv:2010.01412: a second forward and backward, at the worst place near by."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is not None, "SAM needs a closure"
        torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad)


def inverse_root(matrix: torch.Tensor) -> torch.Tensor:
    """A symmetric matrix to the power of -1/4."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ (values.clamp(min=1e-12).pow(-0.25)[:, None] * vectors.T)
