"""Optimizers of a user's own, over the model's parameters in place of the engine's tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from merak.core.errors import ArgumentsError
from merak.engine.zero.optimizer_params import OptimizerParams


def use_optimizer_tensors(
    optimizer: torch.optim.Optimizer, model: nn.Module, own: OptimizerParams
) -> None:
    """Let an optimizer step this rank's tensors in place of the model's parameters.

    With ZeRO or float32 masters these are other tensors, and parameters of other ranks are not
    here. Its groups keep their order and options.

    Args:
        optimizer: new; of the model's parameters, of optimizer tensors, or both.
        model: the user's, as the engine has laid it out.
        own: this rank's parameters and their optimizer tensors.

    Raises:
        ArgumentsError: it holds a tensor that is not the model's, or has a state of one already.
    """
    named: dict[int, nn.Parameter | None] = {
        id(parameter): None for parameter in model.parameters() if parameter.is_meta
    }
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in own.items:
            tensor = own.items[name].tensor
            named[id(parameter)] = tensor if tensor.numel() else None
    for item in own.items.values():
        tensor = item.tensor
        named[id(item.parameter)] = tensor if tensor.numel() else None
        named.setdefault(id(tensor), tensor if tensor.numel() else None)
    for group in optimizer.param_groups:
        found = [(given, _own_tensor(optimizer, given, named)) for given in group["params"]]
        for given, tensor in found:
            if tensor is not given:
                _refuse_state(optimizer, given)
        tensors = [tensor for _, tensor in found if tensor is not None]
        group["params"][:] = {id(tensor): tensor for tensor in tensors}.values()


def _own_tensor(
    optimizer: torch.optim.Optimizer, given: Any, named: dict[int, nn.Parameter | None]
) -> Any:
    if id(given) in named:
        return named[id(given)]
    if not given.requires_grad:
        return given  # never stepped
    raise ArgumentsError(
        f"{type(optimizer).__name__} holds a tensor of shape {tuple(given.shape)} that is no "
        "parameter of the trainer's model as it is laid out; make the optimizer in "
        "create_optimizer, of self.model.named_parameters()."
    )


def _refuse_state(optimizer: torch.optim.Optimizer, given: torch.Tensor) -> None:
    if given in optimizer.state:
        raise ArgumentsError(
            f"{type(optimizer).__name__} makes its state before the first step, for parameters "
            "that this rank does not step itself (ZeRO, master_weights, or another stage's); pass "
            "optimizer_cls_and_kwargs=(class, {…}) instead."
        )
