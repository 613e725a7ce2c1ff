"""Optimizers whose momenta replicas may send as signs: their variance is frozen after a warm-up.

Without `gradient_compression="1bit"` they are the same optimizers, of plain gradients.

Sources: arXiv 2102.02888 (1-bit Adam), algorithm 1; arXiv 2104.06069 (1-bit LAMB), algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from merak.core.errors import ArgumentsError

COEFFICIENTS = (0.01, 10.0)
"""Least and largest ratio of the norms of a parameter and its update, as published."""

COEFFICIENT_DECAY = 0.9
"""Decay of its moving average in the warm-up."""

FACTORS = (0.5, 4.0)
"""Least and largest factor of that average afterwards."""

FACTOR_CHANGE = 0.1
"""Largest relative change of the factor in a step."""


class OneBitAdam(torch.optim.Optimizer):
    """AdamW whose second moment stays as it is after a warm-up, as 1-bit Adam's.

    With `gradient_compression="1bit"` gradients are reduced as they are until then, and afterwards
    replicas send the signs of their momenta.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        warmup_steps: steps of a parameter before its second moment is frozen: so many that it no
            longer changes much, such as a seventh of a training.
        betas: decay of the momentum, and of the second moment.
        eps: added to the root of the second moment.
        weight_decay: as of AdamW.

    Source: arXiv 2102.02888, algorithm 1; the bias of both moments is corrected as AdamW does.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        *,
        warmup_steps: int,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        if warmup_steps < 1:
            raise ArgumentsError(
                f"{warmup_steps=} leaves no second moment to freeze; use a seventh of the steps."
            )
        options = {"lr": lr, "warmup_steps": warmup_steps, "betas": betas, "eps": eps}
        super().__init__(params, options | {"weight_decay": weight_decay})

    def reduced_momentum(
        self, parameter: torch.Tensor, group: Mapping[str, Any]
    ) -> tuple[torch.Tensor, float] | None:
        """Momentum of a parameter and its decay, which replicas may reduce; None in the warm-up.

        Args:
            parameter: one that it steps.
            group: of the parameter.
        """
        state = self.state.get(parameter, {})
        if not state or int(state["step"]) < group["warmup_steps"]:
            return None
        return state["exp_avg"], group["betas"][0]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step every parameter that has a gradient.

        Args:
            closure: computes the loss anew, as of torch's optimizers; None for none.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: Any) -> None:
        state = self.state[parameter]
        (beta1, beta2), warmup = group["betas"], group["warmup_steps"]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        number = int(state["step"])
        momentum, square = state["exp_avg"], state["exp_avg_sq"]
        momentum.lerp_(gradient, 1.0 - beta1)
        if number <= warmup:
            square.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
        root = (square / (1.0 - beta2 ** min(number, warmup))).sqrt_().add_(group["eps"])
        self._move(parameter, momentum / (1.0 - beta1**number) / root, root, gradient, group)

    def _move(
        self,
        parameter: torch.Tensor,
        update: torch.Tensor,
        root: torch.Tensor,
        gradient: torch.Tensor,
        group: Mapping[str, Any],
    ) -> None:
        """Move a parameter by the ratio of its moments, of which the second has a root."""
        parameter.mul_(1.0 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * update)


class OneBitLamb(OneBitAdam):
    """LAMB whose second moment stays as it is after a warm-up, as 1-bit LAMB's.

    In the warm-up each parameter moves by as much as its norm tells. Afterwards it is the moving
    average of that ratio, times how much smaller the root of a second moment has become that goes
    on: of the gradients that lead to the reduced momenta.

    Args:
        params: as of `OneBitAdam`, like all others.

    Source: arXiv 2104.06069, algorithm 1. Its common scale of all momenta is left out: here each
    row has one.
    """

    def _move(
        self,
        parameter: torch.Tensor,
        update: torch.Tensor,
        root: torch.Tensor,
        gradient: torch.Tensor,
        group: Mapping[str, Any],
    ) -> None:
        state, warmup = self.state[parameter], group["warmup_steps"]
        whole = update + group["weight_decay"] * parameter
        if int(state["step"]) <= warmup:
            norm, length = parameter.norm(), whole.norm()
            ratio = (norm / length).clamp(*COEFFICIENTS)
            ratio = torch.where((norm > 0) & (length > 0), ratio, 1.0)
            before = state.get("coefficient", ratio)
            state["coefficient"] = before.lerp(ratio, 1.0 - COEFFICIENT_DECAY)
            state["factor"] = torch.ones_like(ratio)
            if int(state["step"]) == warmup:
                state["fresh_exp_avg_sq"] = state["exp_avg_sq"].clone()
        else:
            ratio = state["coefficient"] * self._factor(state, update, whole, root, gradient, group)
        parameter.sub_(group["lr"] * ratio * whole)

    def _factor(
        self,
        state: dict[str, Any],
        update: torch.Tensor,
        whole: torch.Tensor,
        root: torch.Tensor,
        gradient: torch.Tensor,
        group: Mapping[str, Any],
    ) -> torch.Tensor:
        """How much larger the frozen root is than that of the second moment that goes on."""
        beta2, fresh = group["betas"][1], state["fresh_exp_avg_sq"]
        fresh.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
        now = (fresh / (1.0 - beta2 ** int(state["step"]))).sqrt_().add_(group["eps"])
        factor: torch.Tensor = (root / now).max()
        if group["weight_decay"]:  # of which the second moments know nothing
            part = (update.norm() / whole.norm()).clamp(max=1.0)
            factor = torch.lerp(torch.ones_like(factor), factor, part)
        before = state["factor"]
        factor = factor.clamp(*FACTORS)
        factor = factor.clamp(before * (1.0 - FACTOR_CHANGE), before * (1.0 + FACTOR_CHANGE))
        state["factor"] = factor
        return factor
