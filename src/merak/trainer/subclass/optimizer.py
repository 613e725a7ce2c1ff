"""The order of parameters in an optimizer's groups, for checkpoints of transformers' Trainer."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from merak.checkpoint.formats.of_trainer import Order
from merak.engine.zero.optimizer_params import OptimizerParams
from merak.graph.weights.holders import first_names, named_tensors


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
