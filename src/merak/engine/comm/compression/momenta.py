"""Momenta of optimizers that replicas reduce in the place of gradients.

Error feedback is right for what moves the parameters linearly. Adam's second moment does not, so
1-bit Adam freezes it, and from then on replicas reduce its momentum: each adds its own gradient to
the momentum that all have. An optimizer wants that by its method `reduced_momentum`. It gets
gradients all the same, those that lead it to the reduced momentum. DGC does so for torch's SGD.

Sources: arXiv 2102.02888 (1-bit Adam), algorithm 1; arXiv 1712.01887 (DGC), section 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from merak.core.errors import ArgumentsError

Momentum = tuple["torch.Tensor | None", float]
"""A momentum before a step, None before the first one, and its decay."""


class Momenta:
    """The momenta of a rank's optimizers that replicas reduce, by the model's parameters.

    Args:
        kind: of compression.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._stepped: dict[int, tuple[Any, torch.Tensor]] = {}
        self._groups: dict[int, Any] = {}
        self._reduced: dict[int, Momentum] = {}

    def follow(self, optimizer: Any, tensors: Mapping[int, torch.Tensor]) -> None:
        """Reduce an optimizer's momenta as soon as it wants that.

        Args:
            optimizer: of this rank.
            tensors: the optimizer tensors of this rank by the id of the model's parameter.

        Raises:
            ArgumentsError: DGC does not know its momentum.
        """
        if not self.reduces(optimizer):
            return
        if self._kind == "dgc":
            _refuse_others(optimizer)
        own = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
        found = {key: (optimizer, one) for key, one in tensors.items() if id(one) in own}
        self._stepped.update(found)
        optimizer.register_step_pre_hook(lambda *_: self._give_gradients(found))

    def reduces(self, optimizer: Any) -> bool:
        """Whether replicas reduce an optimizer's momenta, sooner or later."""
        wants = callable(getattr(optimizer, "reduced_momentum", None))
        return self._kind == "dgc" or (self._kind == "1bit" and wants)

    def start_step(self) -> None:
        """Forget what the step before has reduced, which may have been skipped."""
        self._reduced.clear()
        optimizers = {id(optimizer): optimizer for optimizer, _ in self._stepped.values()}
        groups = [group for own in optimizers.values() for group in own.param_groups]
        self._groups = {id(tensor): group for group in groups for tensor in group["params"]}

    def wants(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter's momentum is reduced, sooner or later, and never its gradient."""
        return id(parameter) in self._stepped

    def of(self, parameter: torch.Tensor) -> Momentum | None:
        """The momentum of a parameter and its decay in a step; None where it is not reduced yet."""
        optimizer, tensor = self._stepped[id(parameter)]
        group, state = self._groups[id(tensor)], optimizer.state.get(tensor, {})
        if self._kind == "dgc":
            return state.get("momentum_buffer"), group["momentum"]
        found: Momentum | None = optimizer.reduced_momentum(tensor, group)
        return found

    def reduce(self, parameter: torch.Tensor) -> Momentum:
        """As `of`, for a parameter whose gradient is the momentum after this step."""
        found = self.of(parameter)
        assert found is not None, "momenta are reduced when they are wanted"
        self._reduced[id(parameter)] = found
        return found

    @torch.no_grad()
    def _give_gradients(self, stepped: Mapping[int, tuple[Any, torch.Tensor]]) -> None:
        """Replace reduced momenta by the gradients that lead an optimizer to them."""
        for key, (_, tensor) in stepped.items():
            momentum, decay = self._reduced.pop(key, (None, 0.0))
            if momentum is not None and tensor.grad is not None:
                tensor.grad.sub_(momentum, alpha=decay)
                if self._kind != "dgc":  # SGD adds a gradient whole
                    tensor.grad.div_(1.0 - decay)


def _refuse_others(optimizer: Any) -> None:
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else [{}]
    for group in groups:
        if group.get("momentum") is None or group["nesterov"] or group["dampening"]:
            raise ArgumentsError(
                "gradient_compression='dgc' corrects the momentum of torch.optim.SGD without "
                f"nesterov and dampening, and the optimizer is {type(optimizer).__name__}; use "
                "such an SGD, or gradient_compression='topk'."
            )
