"""Small stand-ins for the tensors of an optimizer, which a trial steps in their place.

A stand-in keeps what an update may depend on: the number of dims, which one is longer, how this
layout cuts it, and on which side of the optimizer's thresholds (`max_precond_dim` and the like) the
whole and the shard are.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from merak.core.shards import ParameterShard

SMALL = 1024
"""Elements of an ordinary stand-in, at most."""

LARGE = 65_536
"""Elements of the one large stand-in, at most, so that its shards are above 16,384."""

_FIXED_DIM = 16
"""Dims up to this size, such as those of convolution kernels, keep it."""

_MAX_DEGREE = 8

_COUNTS_STEPS = re.compile(r"step|freq|warm|every|interval|period|iter|start|delay|until|rampup")
"""Names of options that count steps."""

_SOON = 6
"""Steps after which what an option lets begin later begins in a trial."""


@dataclass(frozen=True, slots=True)
class JobTensor:
    """A parameter of the job, as its optimizer steps it.

    Args:
        group: number of its group.
        shape: of the whole parameter.
        cut_dim: the dim along which ranks hold shards; None where each holds all.
        cut_degree: over how many.
        row_degree: over how many replicas the rows of that are shared out (ZeRO); 1 for none.
    """

    group: int
    shape: tuple[int, ...]
    cut_dim: int | None = None
    cut_degree: int = 1
    row_degree: int = 1


def job_tensor(
    shape: tuple[int, ...], shard: ParameterShard | None, replicas: int, group: int = 0
) -> JobTensor:
    """A parameter as a layout cuts it.

    Args:
        shape: of the whole.
        shard: how it is sharded; None for whole on each rank.
        replicas: over how many its rows are shared out; 1 for none.
        group: number of its group.
    """
    if shard is None or shard.owner is not None:  # experts that one rank has whole
        return JobTensor(group, shape, row_degree=replicas)
    return JobTensor(group, shape, shard.dim, shard.num_shards, replicas)


@dataclass(frozen=True, slots=True)
class SmallTensor:
    """A stand-in for parameters of one kind.

    Args:
        of: one of them.
        shape: of the stand-in.
        factor: of its longer dims by those of the parameter.
        options: of their group, as they are for it.
    """

    of: JobTensor
    shape: tuple[int, ...]
    factor: float
    options: Mapping[str, Any]

    def scaled(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Copies of options, with thresholds and numbers of steps for the stand-in."""
        found = {name: copy.deepcopy(value) for name, value in options.items()}
        for name, value in _thresholds(options):
            found[name] = _threshold(value, self.of.shape, self.shape, self.factor)
        counts = {name: value for name, value in options.items() if _is_count(name, value)}
        return found | {name: min(value, _SOON) for name, value in counts.items()}

    def shard(self, whole: torch.Tensor, cut: Cut) -> torch.Tensor:
        """Shard of a whole tensor that a rank's optimizer steps."""
        if cut.axis == "tp" and self.of.cut_dim is not None:
            parts = whole.tensor_split(self.of.cut_degree, dim=self.of.cut_dim)
            return parts[0 if cut.first else -1]
        if cut.axis == "rows" and self.of.row_degree > 1 and whole.dim():
            degree = max(whole.shape[0], 1) if cut.single else self.of.row_degree
            return whole.tensor_split(degree, dim=0)[0 if cut.first else -1]
        return whole


@dataclass(frozen=True, slots=True)
class Cut:
    """Cut of the small tensors in a trial: the shards that its optimizers step.

    Args:
        axis: "tp" for shards over ranks, "rows" for those of ZeRO.
        first: the first rank's, else the last's.
        single: rows one by one.
    """

    axis: str
    first: bool
    single: bool = False


def cuts_of(tensors: Iterable[SmallTensor]) -> list[Cut]:
    """The cuts of a layout, each of which a trial steps by itself."""
    found: list[Cut] = []
    tensors = list(tensors)
    if any(one.of.cut_dim is not None for one in tensors):
        found += [Cut("tp", True), Cut("tp", False)]
    if any(one.of.row_degree > 1 for one in tensors):
        found += [Cut("rows", True), Cut("rows", False), Cut("rows", True, single=True)]
    return found


def small_tensors(
    tensors: Iterable[JobTensor], groups: Sequence[Mapping[str, Any]]
) -> list[SmallTensor]:
    """Stand-ins for the tensors of a job, one for each kind, and a large one in the end.

    Args:
        tensors: of the optimizer on this rank.
        groups: of the optimizer.
    """
    kinds: dict[object, JobTensor] = {}
    for one in tensors:
        kinds.setdefault(_kind(one, groups[one.group]), one)
    made = [_shrink(one, groups[one.group], SMALL) for one in kinds.values()]
    if kinds:
        most = max(kinds.values(), key=lambda one: (len(one.shape) == 2, math.prod(one.shape)))
        made.append(_shrink(_over_two(most), groups[most.group], LARGE))
    return made


def in_two(one: SmallTensor) -> SmallTensor:
    """A stand-in that is cut into two shards where it is cut into more.

    Args:
        one: stand-in of any cut.
    """
    return replace(one, of=_over_two(one.of))


def _over_two(one: JobTensor) -> JobTensor:
    return replace(one, cut_degree=min(one.cut_degree, 2), row_degree=min(one.row_degree, 2))


def _kind(one: JobTensor, group: Mapping[str, Any]) -> object:
    """What tells kinds of tensors apart."""
    order = tuple(tuple(a < b for b in one.shape) for a in one.shape)
    limits = [value for _, value in _thresholds(group)]
    sides = tuple(size <= limit for limit in limits for size in (*one.shape, math.prod(one.shape)))
    options = tuple((name, _signature(v)) for name, v in sorted(group.items()) if name != "params")
    cut = (one.cut_dim, one.cut_degree, one.row_degree)
    return (order, cut, sides, options)


def _signature(value: Any) -> object:
    """What may make a difference of kind: of numbers only whether they are zero."""
    if isinstance(value, (bool, str, type(None))):
        return value
    if isinstance(value, (int, float)):
        return value != 0
    if isinstance(value, (tuple, list)):
        return tuple(map(_signature, value))
    return type(value).__name__


def _shrink(one: JobTensor, group: Mapping[str, Any], most: int) -> SmallTensor:
    long = [size for size in one.shape if size > _FIXED_DIM]
    fixed = math.prod(size for size in one.shape if size <= _FIXED_DIM)
    number = math.prod(one.shape)
    factor = 1.0
    if long and number > most:
        factor = (most / max(fixed, 1) / math.prod(long)) ** (1 / len(long))
    shape = tuple(
        size if size <= _FIXED_DIM else max(2, math.floor(size * factor)) for size in one.shape
    )
    degree = min(one.cut_degree, _MAX_DEGREE)
    own = replace(one, cut_degree=degree, row_degree=min(one.row_degree, _MAX_DEGREE))
    options = {k: v for k, v in group.items() if k not in _OF_THE_GROUP}
    small = SmallTensor(own, shape, factor, {})
    return replace(small, options=small.scaled(options) | _learning_rate(group))


_OF_THE_GROUP = ("params", "param_names", "initial_lr")


def _learning_rate(group: Mapping[str, Any]) -> dict[str, Any]:
    """A rate that moves the stand-ins; a schedule that warms up begins with none."""
    rate = group.get("initial_lr", group.get("lr"))
    if isinstance(rate, torch.Tensor):
        return {"lr": rate.detach().clone().clamp(min=1e-3)}
    return {"lr": max(rate, 1e-3)} if isinstance(rate, (int, float)) else {}


def _thresholds(group: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Options that may be compared with sizes of tensors."""
    return [
        (name, value)
        for name, value in sorted(group.items())
        if type(value) is int and value > _FIXED_DIM and not _is_count(name, value)
    ]


def _is_count(name: str, value: Any) -> bool:
    return type(value) is int and value > _SOON and _COUNTS_STEPS.search(name) is not None


def _threshold(value: int, whole: tuple[int, ...], small: tuple[int, ...], factor: float) -> int:
    """The threshold of a stand-in: on the same side of its dims, or else of its elements."""
    number, few = math.prod(whole), math.prod(small)
    if value <= max(whole, default=1):
        return max(1, round(value * factor))
    if value <= number:
        return max(max(small, default=1) + 1, value * few // number)
    return value
