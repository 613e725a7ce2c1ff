"""Optimizers of a user's own, over the model's parameters in place of the engine's tensors."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from merak.checkpoint.formats.of_trainer import Order
from merak.core.errors import ArgumentsError
from merak.engine.zero.optimizer_params import OptimizerParams
from merak.graph.weights.holders import first_names, named_tensors


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


def parameter_order(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    own: OptimizerParams,
    decayed: Collection[str],
) -> Order | None:
    """Return the names of the parameters in the groups that one process would have.

    Args:
        optimizer: new; of the model's parameters, or of this rank's as transformers groups them.
        model: the user's, as the engine has laid it out.
        own: this rank's parameters and their optimizer tensors.
        decayed: names of the parameters that weight decay applies to.

    Returns:
        Names by group; None where they are neither all here nor in transformers' two groups.
    """
    firsts = first_names(named_tensors(model))
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, item in own.items.items():
        named |= {id(item.parameter): firsts[name], id(item.tensor): firsts[name]}
    groups = [[named.get(id(one)) for one in group["params"]] for group in optimizer.param_groups]
    here = [[name for name in names if name is not None] for names in groups]
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if set().union(*here) >= set(trained) and groups == here:
        return here
    split = [[n for n in trained if n in decayed], [n for n in trained if n not in decayed]]
    is_split = len(here) == 2 and all(set(o) <= set(s) for o, s in zip(here, split))
    return split if is_split else None


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
