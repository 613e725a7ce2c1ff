"""Memory of an optimizer, measured by a step on fake parameters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from merak.core.rank0 import is_rank0
from merak.core.storages import Storages
from merak.core.tensor_meta import TensorMeta

logger = logging.getLogger(__name__)

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

_UNKNOWN_COPIES = 2
"""Copies of the parameters that are counted for an optimizer that cannot step on fake ones."""


@dataclass(frozen=True, slots=True)
class OptimizerMemory:
    """Memory of an optimizer.

    Args:
        state_bytes: optimizer state of each parameter.
        taken_bytes: peak of its step beyond the state.
    """

    state_bytes: tuple[int, ...]
    taken_bytes: int


def optimizer_memory(
    factory: OptimizerFactory | None, parameters: Sequence[TensorMeta], device: torch.device
) -> OptimizerMemory:
    """Memory of an optimizer for some parameters.

    Args:
        factory: makes the optimizer; None where there is none.
        parameters: those that are trained.
        device: where they are.
    """
    if factory is None or not parameters:
        return OptimizerMemory((0,) * len(parameters), 0)
    try:
        return measure_step(factory, parameters, device)
    except Exception as error:
        # A user's own optimizer may read values, which fake tensors do not have.
        log = logger.warning if is_rank0() else logger.debug
        log(
            "The memory of the optimizer is not known before it runs (%s: %s); counted are %d "
            "copies of the parameters.",
            type(error).__name__,
            str(error).partition("\n")[0],
            _UNKNOWN_COPIES,
        )
        return OptimizerMemory(tuple(_UNKNOWN_COPIES * meta.num_bytes for meta in parameters), 0)


class OptimizerMemories:
    """Measures the memory of one kind of optimizer; for equal parameters only once.

    Args:
        factory: makes the optimizer; None where there is none.
        device: where the parameters are.
    """

    def __init__(self, factory: OptimizerFactory | None, device: torch.device) -> None:
        self.factory = factory
        self.device = device
        self._known: dict[tuple[TensorMeta, ...], OptimizerMemory] = {}
        self._single: dict[frozenset[TensorMeta], _Single | None] = {}

    def __call__(self, parameters: Sequence[TensorMeta]) -> OptimizerMemory:
        """Memory of the optimizer for some parameters, that are trained."""
        if self.factory is None or not parameters:
            return optimizer_memory(None, parameters, self.device)
        kinds, every = frozenset(parameters), tuple(parameters)
        if kinds not in self._single:
            self._single[kinds] = self._measure_single(tuple(dict.fromkeys(parameters)))
        single = self._single[kinds]
        if single is not None:
            states = tuple(single.state_bytes[meta] for meta in parameters)
            return OptimizerMemory(states, single.taken_bytes)
        if every not in self._known:
            self._known[every] = optimizer_memory(self.factory, parameters, self.device)
        return self._known[every]

    def _measure_single(self, kinds: tuple[TensorMeta, ...]) -> _Single | None:
        """Memory of an optimizer that steps its parameters one after another; None for others.

        For it, further equal parameters add their states, and take no more at a time.
        """
        assert self.factory is not None
        try:
            once = measure_step(self.factory, kinds, self.device)
            twice = measure_step(self.factory, (*kinds, *kinds), self.device)
        except Exception:  # the whole list's own measurement warns of it
            return None
        same = twice.state_bytes == once.state_bytes * 2
        if not same or twice.taken_bytes != once.taken_bytes:
            return None
        return _Single(dict(zip(kinds, once.state_bytes, strict=True)), once.taken_bytes)


@dataclass(frozen=True, slots=True)
class _Single:
    """Memory of an optimizer that steps its parameters one after another."""

    state_bytes: Mapping[TensorMeta, int]
    taken_bytes: int


def measure_step(
    factory: OptimizerFactory, metas: Sequence[TensorMeta], device: torch.device
) -> OptimizerMemory:
    """Memory of an optimizer's step on fake parameters; raises what the optimizer does.

    Args:
        factory: makes the optimizer.
        metas: the parameters.
        device: where they are.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.no_grad():
        parameters = [
            nn.Parameter(torch.empty(meta.shape, dtype=meta.dtype, device=device)) for meta in metas
        ]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
    known = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
    # Outside of the mode: counts of steps are then real tensors, whose values optimizers read.
    optimizer = factory(parameters)
    optimizer.step()
    state = [_state_bytes(optimizer, parameter) for parameter in parameters]
    held = [t for t in tree_leaves(dict(optimizer.state)) if isinstance(t, torch.Tensor)]
    with Storages([*known, *held]) as storages:
        optimizer.step()
    return OptimizerMemory(tuple(state), storages.peak_bytes)


def _state_bytes(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> int:
    leaves = tree_leaves(dict(optimizer.state.get(parameter, {})))
    return sum(leaf.untyped_storage().nbytes() for leaf in leaves if isinstance(leaf, torch.Tensor))
