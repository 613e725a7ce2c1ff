"""Memory of an optimizer, measured by a step on fake parameters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from merak.core.rank0 import is_rank0
from merak.core.storages import Storages
from merak.core.tensor_meta import TensorMeta
from merak.plan.optimizer.average import keep_averages
from merak.plan.optimizer.findings import find_before
from merak.plan.optimizer.needs import Findings
from merak.plan.optimizer.small_tensors import JobTensor
from merak.plan.optimizer.whole_reductions import CutParameter, WholeReductions, shards_of

logger = logging.getLogger(__name__)

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

_UNKNOWN_COPIES = 2
"""Copies of the parameters that are counted for an optimizer that cannot step on fake ones."""


_MOST_READS = 100_000
"""Numbers that a step may read."""

_NUMBERS = 256
"""Bytes of a parameter's numbers, such as norms, of which estimates by kind know nothing."""

_How = tuple[str | None, bool]
"""Arguments `kernels` and `by_reductions` of `measure_step`."""


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
    factory: OptimizerFactory | None,
    parameters: Sequence[TensorMeta],
    device: torch.device,
    kernels: str | None = None,
    by_reductions: bool = False,
    ema_decay: float | None = None,
) -> OptimizerMemory:
    """Memory of an optimizer for some parameters.

    Args:
        factory: makes the optimizer; None where there is none.
        parameters: those that are trained.
        device: where they are.
        kernels: type of the device whose kernels run, which need not be here; None for `device`'s.
        by_reductions: whether they are shards, stepped by reductions of the whole parameters.
        ema_decay: of averages that it keeps of them; None for none.
    """
    if factory is None or not parameters:
        return OptimizerMemory((0,) * len(parameters), 0)
    try:
        return measure_step(factory, parameters, device, kernels, by_reductions, ema_decay)
    except Exception as error:
        # A user's own optimizer may read values, which fake tensors do not have.
        log = logger.warning if is_rank0() else logger.debug
        log(
            "The memory of the optimizer is not known before it runs (%s: %s); counted are %d "
            "copies of the parameters.",
            type(error).__name__,
            str(error).partition("\n")[0],
            copies := _UNKNOWN_COPIES + (ema_decay is not None),
        )
        return OptimizerMemory(tuple(copies * meta.num_bytes for meta in parameters), 0)


class OptimizerMemories:
    """Measures the memory of one optimizer's class; for equal kinds of parameters only once.

    Args:
        factory: makes the optimizer; None where there is none.
        device: where the parameters are.
        ema_decay: of averages that it keeps of them; None for none.
    """

    def __init__(
        self,
        factory: OptimizerFactory | None,
        device: torch.device,
        ema_decay: float | None = None,
    ) -> None:
        self.factory = factory
        self.device = device
        self.ema_decay = ema_decay
        self._lists: dict[tuple[_How, tuple[TensorMeta, ...]], OptimizerMemory] = {}
        self._kinds: dict[tuple[_How, frozenset[TensorMeta]], _Kinds | None] = {}
        self._findings: dict[tuple[bool, bool], Findings] = {}

    def findings(self, tensors: Sequence[tuple[TensorMeta, JobTensor]]) -> Findings:
        """Findings of a trial of the optimizer, which runs once for each kind of layout.

        Args:
            tensors: what it steps on a rank, of the shapes that it has there, as it is cut.
        """
        if self.factory is None:
            return Findings()
        kind = (
            any(one.cut_dim is not None for _, one in tensors),
            any(one.row_degree > 1 for _, one in tensors),
        )
        if kind not in self._findings:
            self._findings[kind] = find_before(self.factory, tensors, self.device)
        return self._findings[kind]

    def __call__(
        self,
        parameters: Sequence[TensorMeta],
        kernels: str | None = None,
        by_reductions: bool = False,
    ) -> OptimizerMemory:
        """Memory of the optimizer for some parameters; arguments as of `measure_step`."""
        if self.factory is None or not parameters:
            return optimizer_memory(None, parameters, self.device)
        how = (kernels, by_reductions)
        key = (how, frozenset(parameters))
        if key not in self._kinds:
            known = self._among_more(*key)
            metas = tuple(dict.fromkeys(parameters))
            self._kinds[key] = known or self._measure_kinds(metas, how)
        kinds = self._kinds[key]
        if kinds is not None:
            return kinds.of(parameters)
        every = (how, tuple(parameters))
        if every not in self._lists:
            rest = (self.device, *how, self.ema_decay)
            self._lists[every] = optimizer_memory(self.factory, parameters, *rest)
        return self._lists[every]

    def _among_more(self, how: _How, metas: frozenset[TensorMeta]) -> _Kinds | None:
        """What is known of more kinds, each of which adds its own bytes."""
        for (of, others), kinds in self._kinds.items():
            adds = kinds is not None and kinds.own is not None
            if of == how and adds and metas <= others:
                return kinds
        return None

    def _measure_kinds(self, metas: tuple[TensorMeta, ...], how: _How) -> _Kinds | None:
        """Memory by kind of parameter; None for an optimizer that is neither sort of `_Kinds`."""
        factory, rest = self.factory, (self.device, *how, self.ema_decay)
        assert factory is not None
        try:
            once = measure_step(factory, metas, *rest)
            twice = measure_step(factory, (*metas, *metas), *rest)
            if twice.state_bytes != once.state_bytes * 2:
                return None
            states = dict(zip(metas, once.state_bytes, strict=True))
            if twice.taken_bytes == once.taken_bytes:
                return _Kinds(states, once.taken_bytes, None)
            own = {}
            for meta in metas:
                one, two = (measure_step(factory, (meta,) * n, *rest) for n in (1, 2))
                own[meta] = (one.taken_bytes, two.taken_bytes - one.taken_bytes)
        except Exception:  # the measurement of the whole list warns of it
            return None
        by_reductions = how[1]
        if not by_reductions and any(most != holds for most, holds in own.values()):
            return None
        found, numbers = _Kinds(states, 0, own), _NUMBERS if by_reductions else 0
        for made, real in ((found.of(metas), once), (found.of((*metas, *metas)), twice)):
            if abs(made.taken_bytes - real.taken_bytes) > numbers * len(real.state_bytes):
                return None
        return found


@dataclass(frozen=True, slots=True)
class _Kinds:
    """Memory of an optimizer that steps parameters one after another, or all at the same time.

    Args:
        state_bytes: by kind of parameter.
        taken_bytes: of the step, where equal parameters take no more than one of them.
        own: else, by kind, the most that a parameter takes in the step, and of that what it holds
            while those behind it are stepped.
    """

    state_bytes: Mapping[TensorMeta, int]
    taken_bytes: int
    own: Mapping[TensorMeta, tuple[int, int]] | None

    def of(self, parameters: Sequence[TensorMeta]) -> OptimizerMemory:
        """Memory for parameters of all these kinds."""
        taken, held = self.taken_bytes, 0
        for most, holds in (self.own[meta] for meta in parameters) if self.own is not None else ():
            taken, held = max(taken, held + most), held + holds
        return OptimizerMemory(tuple(self.state_bytes[meta] for meta in parameters), taken)


def measure_step(
    factory: OptimizerFactory,
    metas: Sequence[TensorMeta],
    device: torch.device,
    kernels: str | None = None,
    by_reductions: bool = False,
    ema_decay: float | None = None,
) -> OptimizerMemory:
    """Memory of an optimizer's step on fake parameters; raises what the optimizer does.

    Args:
        factory: makes the optimizer.
        metas: the parameters.
        device: where they are.
        kernels: type of the device whose kernels run, which need not be here; None for `device`'s.
        by_reductions: whether they are shards, stepped by reductions of the whole parameters.
        ema_decay: of averages that it keeps of them; None for none.
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
    if ema_decay is not None:
        keep_averages(optimizer, ema_decay)
    if (kernels, device.type) == ("cuda", "cpu"):
        _step_as_on_gpu(optimizer)

    def step() -> None:
        with _Numbers(), _whole_reductions(optimizer) if by_reductions else nullcontext():
            optimizer.step()

    step()
    state = [_state_bytes(optimizer, parameter) for parameter in parameters]
    held = [t for t in tree_leaves(dict(optimizer.state)) if isinstance(t, torch.Tensor)]
    with Storages([*known, *held]) as storages:
        step()
    return OptimizerMemory(tuple(state), storages.peak_bytes)


def _whole_reductions(optimizer: torch.optim.Optimizer) -> WholeReductions:
    """The mode of a step over shards, each of which stands for all of its parameter."""
    every = (own for group in optimizer.param_groups for own in group["params"])
    cuts = {own: CutParameter("", own.numel(), tuple(own.shape)) for own in every}
    return WholeReductions(shards_of(optimizer, cuts), lambda parts: [part.value for part in parts])


class _Numbers(TorchDispatchMode):
    """Gives the number one to an optimizer that reads one of a fake tensor, such as a norm."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._num_reads = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        is_read = func is torch.ops.aten._local_scalar_dense.default
        if not (is_read and isinstance(args[0], FakeTensor)):
            return func(*args, **(kwargs or {}))
        self._num_reads += 1
        if self._num_reads > _MOST_READS:  # it iterates until a number is small
            raise RuntimeError("it reads numbers without end")
        return torch.ones((), dtype=args[0].dtype).item()


def _step_as_on_gpu(optimizer: torch.optim.Optimizer) -> None:
    """Have an optimizer step all parameters at once, as torch's do on a GPU by default."""
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True


def _state_bytes(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> int:
    leaves = tree_leaves(dict(optimizer.state.get(parameter, {})))
    return sum(leaf.untyped_storage().nbytes() for leaf in leaves if isinstance(leaf, torch.Tensor))
