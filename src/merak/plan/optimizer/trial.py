"""A trial of an optimizer's class: does it step shards as it steps whole tensors?

Equal optimizers step small stand-ins by the same gradients, side by side: whole tensors twice, the
shards of each cut, and each kind of tensor without the others. What moves otherwise tells what the
update depends on.
"""

from __future__ import annotations

import io
import pickle
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import nn

from merak.core.random import own_random_state, random_state, seed_for, set_random_state
from merak.plan.optimizer.needs import Findings, Reductions
from merak.plan.optimizer.same_class import same_class_optimizer
from merak.plan.optimizer.small_tensors import Cut, SmallTensor, cuts_of, in_two
from merak.plan.optimizer.whole_reductions import (
    Combine,
    CutParameter,
    Exchange,
    Partial,
    WholeReductions,
    shards_of,
)

NUM_STEPS = 30
LIMIT_S = 10.0
_LIMIT_BESIDE_OTHERS_S = 60.0
"""The same where other processes have the processor most of the time."""

_COMPARED = frozenset((0, 1, 2, 5, 10, 20, NUM_STEPS - 1))
"""Steps after which tensors are compared; a difference stays."""

_TOLERANCES = {torch.float64: 1e-5, torch.float32: 2e-3}
"""Difference that rounding explains, of what a tensor has moved. In float64 an optimizer may still
compute in float32; in float32 the tensors themselves are rounded in every step."""

_ATTEMPTS = ((torch.float64, False), (torch.float32, False), (torch.float64, True))
"""Types of the tensors, and whether their gradients are sparse, until an optimizer takes them."""


def run_trial(
    optimizer: torch.optim.Optimizer, tensors: Sequence[SmallTensor], device: torch.device
) -> Findings:
    """Step optimizers like a given one on small tensors, whole and cut.

    Args:
        optimizer: of a job; it is left as it is.
        tensors: stand-ins for its tensors.
        device: where the job's are.
    """
    problem = ""
    # What a class prints when it is made, it has printed for the job's optimizer.
    with _untouched_random_state(device), redirect_stdout(io.StringIO()):
        for dtype, is_sparse in _ATTEMPTS:
            trial = _Trial(optimizer, tensors, device, dtype, is_sparse)
            try:
                return trial.with_reductions(trial.run())
            except _TakesLongError:
                late = f"steps on small tensors take more than {LIMIT_S:.0f} s"
                return replace(trial.findings, unknown=late)
            except Exception as error:  # of any kind: it is the user's own code
                message = str(error).strip().partition("\n")[0]
                problem = problem or f"on small tensors it raises {type(error).__name__}: {message}"
        return Findings(unknown=problem, closure=trial.wants_closure())


class _TakesLongError(Exception):
    """A trial has lasted too long."""


class _Trial:
    """A trial with tensors of one type.

    Args:
        optimizer: as of `run_trial`.
        tensors: as of `run_trial`.
        device: as of `run_trial`.
        dtype: of the tensors.
        is_sparse: whether gradients of matrices are sparse.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        tensors: Sequence[SmallTensor],
        device: torch.device,
        dtype: torch.dtype,
        is_sparse: bool,
    ) -> None:
        self._optimizer, self._device, self._is_sparse = optimizer, device, is_sparse
        self._dtype, self._kinds = dtype, tensors
        self._tolerance, self._is_late = _TOLERANCES[dtype], _deadline()
        self.findings = Findings()
        # Two of each, so that in every group something is among others; of the large one only one.
        self._tensors = [one for one in tensors for _ in range(2)][: 2 * len(tensors) - 1]
        self._starts = [
            0.05 * self._draw(one.shape, "start", place).to(dtype)
            for place, one in enumerate(self._tensors)
        ]
        self._moved = [0.0] * len(self._tensors)

    def run(self) -> Findings:
        """Step until something differs, or for all steps."""
        every = range(len(self._tensors))
        whole, again = self._stepper(every), self._stepper(every)
        cuts = [self._stepper(every, cut) for cut in cuts_of(self._tensors)]
        alone = [self._stepper([place]) for place in every[:-1:2]]
        for step in range(NUM_STEPS):
            gradients = [self._gradient(step, place) for place in every]
            draws = self._step_whole(whole, step, gradients) or self.findings.draws
            # What draws has the same random numbers alone only for the first tensor.
            alone = [] if self.findings.across else alone[:1] if draws else alone
            cuts = [] if self.findings.cut or draws else cuts
            for one in (again, *alone, *cuts):
                self._step(one, step, gradients)
            if step not in _COMPARED:
                continue
            across = any(self._differing(whole, one) is not None for one in alone)
            cut = [self._described(self._differing(whole, one), one.cut) for one in cuts]
            self.findings = Findings(
                self.findings.across or across,
                self.findings.cut or next(filter(None, cut), ""),
                draws,
            )
            if self._differing(whole, again) is not None:
                return replace(self.findings, unknown="two equal runs of it differ")
            if self.findings.across and (self.findings.cut or not cuts):
                break
        if self.findings.draws:
            return replace(self.findings, unknown="it draws random numbers")
        return replace(self.findings, unknown="" if any(self._moved) else "it moves no tensor")

    def with_reductions(self, found: Findings) -> Findings:
        """Findings that say, too, whether shards and reductions of the whole are enough."""
        if not found.cut or found.across or found.unknown:
            return found
        kinds = [in_two(one) for one in self._kinds]
        other = _Trial(self._optimizer, kinds, self._device, self._dtype, self._is_sparse)
        with suppress(Exception):  # of any kind: then it gets whole parameters
            return replace(found, reductions=other.step_by_reductions())
        return found

    def step_by_reductions(self) -> Reductions | None:
        """Step both shards of each cut by the reductions of the whole tensors.

        Returns:
            None where tensors or reductions differ, or states are neither shards nor numbers.
        """
        every = range(len(self._tensors))
        whole, noting = self._stepper(every), self._stepper(every)
        cuts = [cut for cut in cuts_of(self._tensors) if not cut.single]
        shards = [self._stepper(every, cut) for cut in cuts]
        found = Reductions(0, 0, False)
        for step in range(NUM_STEPS):
            gradients = [self._gradient(step, place) for place in every]
            self._step_whole(whole, step, gradients)
            noted = _Noted(self._tolerance)
            num_reads = noting.step(gradients, noted.take)
            parts = [_Replayed(noted) for _ in shards]
            for one, own in zip(shards, parts, strict=True):
                if self._is_late():
                    raise _TakesLongError
                one.step(gradients, own.take)
            if not all(noted.confirms(*parts[i : i + 2]) for i in range(0, len(parts), 2)):
                return None
            if any(self._differing(whole, one) is not None for one in shards):
                return None
            found = _larger(found, noted, num_reads, len(every))
        return found if all(one.has_states_of_shards() for one in shards) else None

    def wants_closure(self) -> bool:
        """Whether a step that is given a closure calls it."""
        called: list[bool] = []

        def closure() -> torch.Tensor:
            called.append(True)
            return torch.zeros((), device=self._device)

        with suppress(Exception):
            stepper = self._stepper([0])
            stepper.set_gradients([self._gradient(0, 0)])
            step: Any = stepper.optimizer.step
            step(closure)
        return bool(called)

    def _step_whole(self, whole: _Stepper, step: int, gradients: Sequence[torch.Tensor]) -> bool:
        """Step whole tensors, and note how far; returns whether random numbers were drawn."""
        self._reseed(step)
        before = self._random_states()
        whole.step(gradients)
        for place, parameter in whole.parameters.items():
            move = float((parameter.detach() - self._starts[place]).abs().max())
            self._moved[place] = max(self._moved[place], move if move == move else 0.0)
        return before != self._random_states()

    def _stepper(self, places: Iterable[int], cut: Cut | None = None) -> _Stepper:
        own = {}
        for place in places:
            start = self._starts[place]
            shard = start if cut is None else self._tensors[place].shard(start, cut)
            if shard.numel():  # what a rank has nothing of is not in its optimizer
                own[place] = nn.Parameter(shard.clone())
        of = [(self._tensors[place], parameter) for place, parameter in own.items()]
        return _Stepper(same_class_optimizer(self._optimizer, of), own, self, cut)

    def shard(self, value: torch.Tensor, place: int, cut: Cut | None) -> torch.Tensor:
        """What is stepped of a whole tensor or gradient, in memory of its own."""
        own = value if cut is None else self._tensors[place].shard(value, cut)
        return own.clone(memory_format=torch.contiguous_format)

    def _step(self, stepper: _Stepper, step: int, gradients: Sequence[torch.Tensor]) -> None:
        if self._is_late():
            raise _TakesLongError
        self._reseed(step)  # so that what draws gets the same numbers
        stepper.step(gradients)

    def _reseed(self, step: int) -> None:
        for device in {self._device.type: self._device, "cpu": torch.device("cpu")}.values():
            set_random_state(device, "trial", step)
        random.seed(step)
        numpy.random.seed(step)

    def _random_states(self) -> list[bytes]:
        """States of the generators that an optimizer may draw from, to be compared."""
        states = [random_state(device) for device in (self._device, torch.device("cpu"))]
        others = (random.getstate(), numpy.random.get_state())
        return [*(state.numpy().tobytes() for state in states), *map(pickle.dumps, others)]

    def gradient_of(self, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient as the parameter gets it."""
        return gradient.to_sparse(1) if self._is_sparse and gradient.dim() > 1 else gradient

    def _draw(self, shape: Sequence[int], *key: int | str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed_for("trial", *key))
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(self._device)

    def _gradient(self, step: int, place: int) -> torch.Tensor:
        """A gradient of which steps, tensors, rows and columns differ much in size."""
        start = self._starts[place]
        # With a direction that stays, by which some estimate how far they have to go.
        gradient = self._draw(start.shape, "gradient", step, place)
        gradient += self._draw(start.shape, "direction", place)
        size = 1.5 * self._draw((), "step", step) + self._draw((), "tensor", place)
        gradient *= size.exp()
        for dim, length in enumerate(start.shape):
            along = [length if other == dim else 1 for other in range(start.dim())]
            gradient *= (0.7 * self._draw(along, "dim", place, dim)).exp()
        if self._is_sparse and start.dim() > 1:
            gradient[torch.arange(len(gradient)) % 8 != step % 8] = 0.0  # rows that nobody read
        return gradient.to(start.dtype)

    def _differing(self, whole: _Stepper, other: _Stepper) -> int | None:
        """The place of a tensor that another optimizer has stepped otherwise; None for none."""
        for place, parameter in other.parameters.items():
            expected = self.shard(whole.parameters[place].detach(), place, other.cut)
            limit = self._tolerance * self._moved[place]
            if not torch.allclose(
                parameter.detach(), expected, rtol=0.0, atol=limit, equal_nan=True
            ):
                return place
        return None

    def _described(self, place: int | None, cut: Cut | None) -> str:
        if place is None or cut is None:
            return ""
        one = self._tensors[place].of
        dim = one.cut_dim if cut.axis == "tp" else 0
        return f"a parameter of shape {one.shape} cut along dim {dim}"


@dataclass(frozen=True, slots=True)
class _Stepper:
    """An optimizer of a trial, with its tensors by place, and how they are cut."""

    optimizer: torch.optim.Optimizer
    parameters: dict[int, nn.Parameter]
    trial: _Trial
    cut: Cut | None

    def set_gradients(self, gradients: Sequence[torch.Tensor]) -> None:
        """Give the tensors what is theirs of whole gradients."""
        for place, parameter in self.parameters.items():
            own = self.trial.shard(gradients[place], place, self.cut)
            parameter.grad = self.trial.gradient_of(own)

    def step(self, gradients: Sequence[torch.Tensor], exchange: Exchange | None = None) -> int:
        """Step by whole gradients; returns how often it has read what was exchanged.

        Args:
            gradients: of all places.
            exchange: gives full reductions of whole tensors; None for those of what is here.
        """
        self.set_gradients(gradients)
        if not self.parameters:
            return 0
        if exchange is None:
            self.optimizer.step()
            return 0
        cuts: dict[torch.Tensor, CutParameter] = {}
        for place, parameter in self.parameters.items():
            whole = gradients[place]
            if self.cut is None or parameter.shape != whole.shape:
                shape = tuple(parameter.shape)
                cuts[parameter] = CutParameter(str(place), whole.numel(), shape)
        with WholeReductions(shards_of(self.optimizer, cuts), exchange) as mode:
            self.optimizer.step()
        num_reads: int = mode.num_reads
        return num_reads

    def has_states_of_shards(self) -> bool:
        """Whether all states have the shape of what they are of, or one element."""
        return all(
            value.shape == parameter.shape or value.numel() <= 1
            for parameter, states in self.optimizer.state.items()
            for value in states.values()
            if isinstance(value, torch.Tensor)
        )


class _Noted:
    """Full reductions of whole tensors in a step, by name, in their order.

    Args:
        tolerance: of reductions of shards, relative.
    """

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self.values: dict[str, list[Partial]] = {}
        self.num_exchanges = 0

    def take(self, parts: Sequence[Partial]) -> list[torch.Tensor]:
        """Note the reductions of whole tensors, and give them back."""
        self.num_exchanges += 1
        for part in parts:
            self.values.setdefault(part.cut.name, []).append(part)
        return [part.value for part in parts]

    def confirms(self, first: _Replayed, last: _Replayed) -> bool:
        """Whether the reductions of two shards make up those of the whole."""
        for name, own in first.values.items():
            others = last.values.get(name, [])  # none where it has nothing of a tensor
            if len(own) != len(self.values[name]) or len(others) not in (0, len(own)):
                return False
            for place, whole in enumerate(self.values[name]):
                parts = [float(one[place].value) for one in (own, others) if one]
                made = sum(parts) if whole.combine is Combine.SUM else max(parts)
                size = max(abs(float(whole.value)), *map(abs, parts))
                if not abs(made - float(whole.value)) <= self._tolerance * size:
                    return False
        return True


class _Replayed:
    """Full reductions of a shard, which gets those of the whole.

    Args:
        noted: of the whole.
    """

    def __init__(self, noted: _Noted) -> None:
        self._noted = noted
        self.values: dict[str, list[Partial]] = {}

    def take(self, parts: Sequence[Partial]) -> list[torch.Tensor]:
        """Note the reductions of a shard, and give those of the whole."""
        found = []
        for part in parts:
            own = self.values.setdefault(part.cut.name, [])
            found.append(self._noted.values[part.cut.name][len(own)].value)
            own.append(part)
        return found


def _larger(found: Reductions, noted: _Noted, num_reads: int, num_tensors: int) -> Reductions:
    """The reductions of the steps until now, and of one more."""
    num = max((len(own) for own in noted.values.values()), default=0)
    is_each = found.is_each or num_reads > 0
    exchanges = -(-noted.num_exchanges // num_tensors) if num_reads else noted.num_exchanges
    return Reductions(max(found.num, num), max(found.exchanges, exchanges), is_each)


def _deadline() -> Callable[[], bool]:
    """Whether a trial that begins now has lasted too long, by its own time on the processor."""
    start, used = time.monotonic(), time.thread_time()

    def is_late() -> bool:
        has_used = time.thread_time() - used > LIMIT_S
        return has_used or time.monotonic() - start > _LIMIT_BESIDE_OTHERS_S

    return is_late


@contextmanager
def _untouched_random_state(device: torch.device) -> Iterator[None]:
    """Restore all random states that a trial sets."""
    own, others = random.getstate(), numpy.random.get_state()
    try:
        with own_random_state(device), own_random_state(torch.device("cpu")):
            yield
    finally:
        random.setstate(own)
        numpy.random.set_state(others)
