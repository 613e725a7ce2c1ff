"""Optimizers over the model's parameters, which are to step the tensors of this rank.

With ZeRO or float32 masters these are other tensors; the layout has replaced parameters by shards;
and parameters of other stages are not here.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from merak.core.errors import ArgumentsError
from merak.engine.zero.optimizer_params import OptimizerParams

Originals = Mapping[nn.Parameter, Sequence[str]]
"""The parameters that a model had before it was laid out, and their names.

To be dropped when it is: most have become those of today (`swap`), others would keep their memory.
"""


Found = Mapping[int, tuple["weakref.ref[nn.Parameter]", nn.Parameter | None]]
"""By id, a parameter that an optimizer may hold, and what it steps in its place on this rank."""


def tensors_by_id(model: nn.Module, own: OptimizerParams, originals: Originals) -> Found:
    """Optimizer tensors of this rank by the id of the parameter that each stands for.

    Args:
        model: the user's, as the engine has laid it out.
        own: this rank's parameters and their optimizer tensors.
        originals: parameters from before.

    Returns:
        Optimizer tensors; None for what is stepped elsewhere.
    """
    found: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter | None]] = {}

    def add(given: nn.Parameter, tensor: nn.Parameter | None) -> None:
        found[id(given)] = weakref.ref(given), tensor

    tensors = {n: i.tensor if i.tensor.numel() else None for n, i in own.items.items()}
    for original, names in originals.items():
        here = [tensors[name] for name in names if name in tensors]
        if original.requires_grad:
            add(original, here[0] if here else None)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in tensors or parameter.is_meta:
            add(parameter, tensors.get(name))
    for name, item in own.items.items():
        add(item.parameter, tensors[name])
        if id(item.tensor) not in found:
            add(item.tensor, tensors[name])
    return found


def is_known(given: Any, found: Found) -> bool:
    """Whether a tensor is one of the parameters, and not another one at its address."""
    return id(given) in found and found[id(given)][0]() is given


def use_optimizer_tensors(
    optimizer: torch.optim.Optimizer,
    found: Found,
    takes_others: bool = False,
) -> None:
    """Let an optimizer step this rank's tensors in place of the model's parameters.

    Its groups keep their order and options.

    Args:
        optimizer: new; of the model's parameters, of optimizer tensors, or both.
        found: as of `tensors_by_id`.
        takes_others: whether it may have tensors that are not the model's.

    Raises:
        ArgumentsError: it holds a tensor that is not the model's, or has a state of one already.
    """
    for group in optimizer.param_groups:
        changed = [(p, _own_tensor(optimizer, p, found, takes_others)) for p in group["params"]]
        for given, tensor in changed:
            if tensor is not given or _has_other_shapes(optimizer.state.get(given, {}), given):
                refuse_state(optimizer, given)
        tensors = [tensor for _, tensor in changed if tensor is not None]
        group["params"][:] = {id(tensor): tensor for tensor in tensors}.values()


def _own_tensor(
    optimizer: torch.optim.Optimizer,
    given: Any,
    found: Found,
    takes_others: bool,
) -> Any:
    if is_known(given, found):
        return found[id(given)][1]
    if takes_others or not given.requires_grad:
        return given  # never stepped, or not by a gradient of this model
    raise ArgumentsError(
        f"{type(optimizer).__name__} holds a tensor of shape {tuple(given.shape)} that is no "
        "parameter of the model as it was given or as it is laid out, so it would never get a "
        "gradient; make the optimizer of model.named_parameters()."
    )


def _has_other_shapes(state: Mapping[str, Any], given: torch.Tensor) -> bool:
    """Whether a state was made for the whole of a parameter that is a shard by now."""
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    return any(own.dim() == given.dim() and own.shape != given.shape for own in tensors)


def refuse_state(optimizer: torch.optim.Optimizer, given: torch.Tensor) -> None:
    """Refuse an optimizer that has a state of a tensor which another one is to replace.

    Raises:
        ArgumentsError: it has one.
    """
    if given in optimizer.state:
        raise ArgumentsError(
            f"{type(optimizer).__name__} makes its state before the first step, for parameters "
            "that this rank does not step itself (shards, ZeRO, master_weights, or another "
            "stage's); have it made of this rank's tensors: optimizer_cls_and_kwargs=(class, {…}) "
            "of the trainer, or the argument of the factory that merak.parallelize calls."
        )
