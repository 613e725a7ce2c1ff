"""Another optimizer of the class and the options of a given one, over tensors of one's choice."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from merak.plan.optimizer.small_tensors import SmallTensor


def same_class_optimizer(
    optimizer: torch.optim.Optimizer, tensors: Sequence[tuple[SmallTensor, nn.Parameter]]
) -> torch.optim.Optimizer:
    """Make an optimizer of a given one's class.

    Args:
        optimizer: the given one, which may have been made by anything; it is left as it is.
        tensors: the parameters of the new one, with what they stand for.
    """
    groups: dict[int, dict[str, Any]] = {}
    for one, parameter in tensors:  # those that stand for the same have one group
        own = groups.setdefault(id(one), {**copy.deepcopy(dict(one.options)), "params": []})
        own["params"].append(parameter)
    try:
        made = _constructed(optimizer, tensors[-1][0], list(groups.values()))
    except Exception:  # its class wants more than its options, such as another optimizer
        made = _copied(optimizer, tensors, list(groups.values()))
    if callable(begin := getattr(made, "train", None)):  # of schedule-free ones, before any step
        begin()
    return made


def _constructed(
    optimizer: torch.optim.Optimizer, largest: SmallTensor, groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    cls = type(optimizer)
    parameters = list(inspect.signature(cls).parameters.values())
    known = {**vars(optimizer), **optimizer.defaults}  # what is in no group is an attribute
    names = [p.name for p in parameters[1:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    found = largest.scaled({name: known[name] for name in names if name in known})
    made = cls(groups, **found)
    expected = {id(parameter) for group in groups for parameter in group["params"]}
    if expected != {id(parameter) for own in made.param_groups for parameter in own["params"]}:
        raise TypeError(f"{cls.__name__} takes no groups")
    return made


def _copied(
    optimizer: torch.optim.Optimizer,
    tensors: Sequence[tuple[SmallTensor, nn.Parameter]],
    groups: list[dict[str, Any]],
) -> torch.optim.Optimizer:
    """A copy in whose attributes, too, the new parameters take the places of the given ones."""
    made: torch.optim.Optimizer = object.__new__(type(optimizer))
    first = {one.of.group: parameter for one, parameter in reversed(tensors)}
    memo: dict[int, Any] = {id(optimizer): made}
    for number, group in enumerate(optimizer.param_groups):
        memo |= {id(given): first.get(number) for given in group["params"]}
    left = ("step", "state", "param_groups", "defaults")
    attributes = {
        name: value
        for name, value in vars(optimizer).items()
        if name not in left and not name.endswith("_hooks")
    }
    vars(made).update(copy.deepcopy(attributes, memo))
    state = {"state": defaultdict(dict), "param_groups": groups, "defaults": optimizer.defaults}
    torch.optim.Optimizer.__setstate__(made, state)
    return made
