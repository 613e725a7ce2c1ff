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
    """A copy in whose attributes, too, the new parameters take the places of the given ones.

    One that wraps another, such as Lookahead, wraps a copy of it over the same new parameters.
    """
    first = {one.of.group: parameter for one, parameter in reversed(tensors)}
    memo: dict[int, Any] = {}
    for number, group in enumerate(optimizer.param_groups):
        memo |= {id(given): first.get(number) for given in group["params"]}
    every = _with_wrapped(optimizer)
    for one in every:
        memo[id(one)] = object.__new__(type(one))
        memo.setdefault(id(one.state), defaultdict(dict))
        own = groups if one is optimizer else _groups_like(one, optimizer, tensors, groups)
        memo.setdefault(id(one.param_groups), own)
    left = ("step", "state", "param_groups", "defaults")
    for one in every:
        attributes = {
            name: value
            for name, value in vars(one).items()
            if name not in left and not name.endswith("_hooks")
        }
        made = memo[id(one)]
        vars(made).update(copy.deepcopy(attributes, memo))
        state = {"state": memo[id(one.state)], "param_groups": memo[id(one.param_groups)]}
        torch.optim.Optimizer.__setstate__(made, state | {"defaults": one.defaults})
    copied: torch.optim.Optimizer = memo[id(optimizer)]
    return copied


def _with_wrapped(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """An optimizer and those in its attributes that step the same groups of parameters."""
    found, expected = [optimizer], _members(optimizer)
    for one in found:
        inner = (v for v in vars(one).values() if isinstance(v, torch.optim.Optimizer))
        found += [v for v in inner if all(v is not f for f in found) and _members(v) == expected]
    return found


def _members(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    return [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]


def _groups_like(
    wrapped: torch.optim.Optimizer,
    optimizer: torch.optim.Optimizer,
    tensors: Sequence[tuple[SmallTensor, nn.Parameter]],
    groups: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Groups of the new parameters for a wrapped optimizer, with its own options."""
    kinds = {id(parameter): one for one, parameter in tensors}
    found = []
    for group in groups:
        small = kinds[id(group["params"][0])]
        own = wrapped.param_groups[small.of.group]
        if own is optimizer.param_groups[small.of.group]:
            found.append(group)
            continue
        options = small.scaled({k: v for k, v in own.items() if k != "params"})
        found.append({**options, "params": group["params"]})
    return found
