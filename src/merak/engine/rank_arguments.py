"""Agreement of the ranks on what they were given: arguments, and the options of optimizers.

A study or a random search that runs on every rank gives each other values. Stages would train with
different learning rates and nobody would notice, or ranks would wait for each other for ever.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from enum import Enum
from typing import Any

import torch
from torch import nn

from merak.core.errors import ArgumentsError
from merak.core.health.status import named
from merak.core.mesh import current_mesh
from merak.core.rank0 import decide_on_rank0, has_peers
from merak.graph.weights.rank_agreement import gather_objects
from merak.plan.cost.optimizer_memory import OptimizerFactory

_OF_THIS_PROCESS = re.compile(r" at 0x[0-9a-f]+|(?<=cuda:)\d+")
_OF_ONE_RANK = ("trace_cache", "memory_budget", "host_bytes_per_s")
"""Merak's own arguments that are about a rank's host."""

_ABSENT = "absent"
_LONGEST = 60
_OPTIMIZER = "optimizer"
_NOT_OPTIONS = ("params", "param_names")
_STEP_OPTIONS = ("lr", "weight_decay", "momentum", "betas")
"""Options that scripts change from step to step; others may be an optimizer's own state."""

_MOST_GROUPS = 8
_STAND_INS = ((2, 2), (2,))
"""Shapes of the parameters that all ranks show an optimizer's factory: a matrix and a bias."""


def refuse_differences(values: Mapping[str, object]) -> None:
    """Refuse values that are not the same on all ranks; a collective of all of them.

    Args:
        values: this rank's, by the names under which people know them.

    Raises:
        ArgumentsError: two ranks differ; on all ranks, with the values of all of them.
    """
    if has_peers(current_mesh()):
        own = {n: text_of(value) for n, value in values.items() if n not in _OF_ONE_RANK}
        _compare(dict(enumerate(gather_objects(own, "the arguments of"))))


def example_of_rank0(what: str, columns: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The example that all ranks lay a model out with; a collective of all of them.

    Replicas have samples of their own, and a trace is made for their lengths and padding.

    Args:
        what: the example, for people.
        columns: this rank's.

    Raises:
        ArgumentsError: ranks have other columns.
    """
    mesh = current_mesh()
    if not has_peers(mesh):
        return dict(columns)
    refuse_differences({f"the columns of {what}": sorted(columns)})
    held = {name: column.detach().cpu() for name, column in columns.items()}
    found = decide_on_rank0(mesh, what, lambda: held)
    return {name: found[name].to(column.device) for name, column in columns.items()}


def refuse_different_optimizers(
    optimizer: torch.optim.Optimizer | None, *, with_groups: bool = True
) -> bool:
    """Refuse optimizers whose class or options are not the same on all ranks; a collective.

    Args:
        optimizer: this rank's, whose parameters may be others than those of other ranks; None
            where it has none, which is left out.
        with_groups: whether the groups of all ranks are the same ones, as far as they are equally
            many; else only those of optimizers with one are.

    Returns:
        Whether there are other ranks, whose groups are the same ones.

    Raises:
        ArgumentsError: two ranks differ; on all ranks, with the values of all of them.
    """
    if not has_peers(current_mesh()):
        return False
    own = None
    if optimizer is not None:
        chosen = {_OPTIMIZER: type(optimizer).__qualname__}
        chosen |= {f"{_OPTIMIZER}'s default {n}": t for n, t in _options(optimizer.defaults)}
        own = (chosen, [dict(_options(group)) for group in optimizer.param_groups])
    found = dict(enumerate(gather_objects(own, "the optimizers of")))
    known = {rank: one for rank, one in found.items() if one is not None}
    _compare({rank: chosen for rank, (chosen, _) in known.items()})
    counts = {len(groups) for _, groups in known.values()}
    are_same = len(counts) == 1 and (with_groups or counts == {1})
    if are_same:
        _compare(
            {
                rank: {
                    f"{name} of {_OPTIMIZER} group {number}": text
                    for number, group in enumerate(groups)
                    for name, text in group.items()
                }
                for rank, (_, groups) in known.items()
            }
        )
    return are_same


def step_options(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Options of an optimizer's next step as text, by name, to compare between ranks.

    Args:
        optimizer: whose groups are the same ones on all ranks; of many groups, there is one text.
    """
    found = {
        f"{name} of {_OPTIMIZER} group {number}": text_of(group[name])
        for number, group in enumerate(optimizer.param_groups)
        for name in _STEP_OPTIONS
        if name in group
    }
    if len(optimizer.param_groups) <= _MOST_GROUPS:
        return found
    digest = hashlib.blake2b(repr(found).encode(), digest_size=8).hexdigest()
    return {f"digest of the options of the {_OPTIMIZER}'s groups": digest}


def stand_in_optimizer(factory: OptimizerFactory | None) -> torch.optim.Optimizer | None:
    """An optimizer of parameters that are the same on all ranks, to compare its options.

    Args:
        factory: of a user.

    Returns:
        None where there is no factory, or it takes no other parameters than the model's.
    """
    if factory is None:
        return None
    with suppress(Exception):
        return factory([nn.Parameter(torch.zeros(shape)) for shape in _STAND_INS])
    return None


def text_of(value: object) -> str:
    """Text of a value, which is the same on all ranks where the value is.

    Args:
        value: an argument. Addresses of objects, numbers of devices and folders of files are left
            out.
    """
    if isinstance(value, Enum):
        value = value.value
    elif isinstance(value, os.PathLike) or (isinstance(value, str) and os.path.isabs(value)):
        value = os.path.basename(value)
    elif isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    elif isinstance(value, set | frozenset):
        value = sorted(map(text_of, value))
    elif callable(value):
        return str(getattr(value, "__qualname__", type(value).__qualname__))
    return _OF_THIS_PROCESS.sub("", repr(value))


def _options(options: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Options of an optimizer or a group as text, without what may be a part of the model."""
    for name, value in options.items():
        is_tensor = isinstance(value, torch.Tensor) and value.numel() != 1
        if name not in _NOT_OPTIONS and not is_tensor:
            yield name, text_of(value)


def _compare(by_rank: Mapping[int, Mapping[str, str]]) -> None:
    for name in dict.fromkeys(name for one in by_rank.values() for name in one):
        ranks: dict[str, list[int]] = {}
        for rank, one in by_rank.items():
            ranks.setdefault(one.get(name, _ABSENT), []).append(rank)
        if len(ranks) > 1:
            listed = ", ".join(
                f"{_shortened(text)} on {named(tuple(own))}" for text, own in ranks.items()
            )
            raise ArgumentsError(
                f"{name} differs by rank: {listed}. All ranks train one model together: draw or "
                "choose it on rank 0 and broadcast it, or seed the draw alike on every rank; "
                "trainer.hyperparameter_search does so for a study."
            )


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
