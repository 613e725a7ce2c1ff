"""Recorder of a loss: what it reads on the host, found while it is traced."""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from io import StringIO
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate import PartialState  # type: ignore[import-untyped]
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from merak.core.errors import TraceError
from merak.core.mesh import Mesh
from merak.core.source_lines import is_library, with_text
from merak.core.tensor_meta import TensorMeta
from merak.graph.trace.calls.host_reads import (
    READ,
    HostReads,
    KnownResults,
    Run,
    loss_in,
    version_of,
)
from merak.graph.trace.calls.replay import ModelCall, Replay, kept_tensors
from merak.graph.trace.state.counters import Counter, watched
from merak.graph.trace.state.places import StateLeft
from merak.graph.trace.state.snapshot import restored_state
from merak.graph.weights.rank_agreement import is_distributed

_NUMBERS: tuple[tuple[float, int, bool], ...] = (
    (0.75, 3, True),
    (0.0, 0, False),
    (40.0, 1 << 20, True),
    (-40.0, -3, False),
    (1e30, 1, True),
    (float("nan"), 2, False),
)
"""Made-up values of floating, whole and boolean tensors, for one run each."""


class ReadDecides(TraceError):
    """A value that the loss reads decides what is computed."""


_RECORDING: ContextVar[HostReadsRecorder | None] = ContextVar("_RECORDING", default=None)


def note_effect() -> bool:
    """Note that the loss does something besides, such as a log, that each step is to do.

    Returns:
        Whether it is traced in a way that steps will.
    """
    recorder = _RECORDING.get()
    if recorder is not None:
        recorder.has_effects = True
    return recorder is not None


@dataclass(frozen=True, slots=True)
class LossState:
    """Python state that a loss may change.

    Args:
        changes: gives what it has changed by now.
        restore: puts back what was there; False where it cannot.
    """

    changes: Callable[[], list[StateLeft]]
    restore: Callable[[], bool]


# Of this thread alone: others, such as one that saves a checkpoint, find the true rank.
_INSTEAD: ContextVar[int | None] = ContextVar("_INSTEAD", default=None)


class FoundRank:
    """The rank that a loss finds outside of the model: on all ranks the same, for one graph."""

    def __init__(self) -> None:
        self.is_read = False

    @property
    def instead(self) -> int | None:
        """The rank that is found in place of the true one; None for the true one."""
        return _INSTEAD.get()

    @contextmanager
    def found(self, rank: int | None) -> Iterator[None]:
        """Context in which whatever asks for the rank finds this one; None for the true one."""
        token = _INSTEAD.set(rank)
        try:
            yield
        finally:
            _INSTEAD.reset(token)

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Context in which attributes and functions that give the rank ask this object."""
        with ExitStack() as stack:
            for owner, name in _RANKS:
                own = vars(owner).get(name)
                value = property(partial(self._get, own, name))
                stack.enter_context(mock.patch.object(owner, name, value, create=True))
            get_rank = dist.get_rank

            def rank(*args: Any, **kwargs: Any) -> int:
                self.is_read = self.is_read or self.instead is not None
                return get_rank(*args, **kwargs) if self.instead is None else self.instead

            stack.enter_context(mock.patch.object(dist, "get_rank", rank))
            yield

    def _get(self, own: Any, name: str, holder: Any) -> Any:
        if self.instead is not None:
            self.is_read = True
            return self.instead
        return vars(holder)[name] if own is None else own.__get__(holder)


_RANKS = (
    (Mesh, "rank"),
    (PartialState, "process_index"),
    (PartialState, "local_process_index"),
)
"""Attributes by which code finds the rank."""


class HostReadsRecorder:
    """Records what a loss reads while it is traced.

    Args:
        numbers: as of `HostReads`; with some, what is read is not found again exactly.
        explores: whether it looks for what the loss reads once it has read other values.

    Attributes:
        has_effects: as of `note_effect`.
    """

    def __init__(self, numbers: Collection[torch.Tensor], *, explores: bool = True) -> None:
        self.has_effects = False
        self._explores = explores
        self._numbers, self._is_exact = numbers, not numbers
        self._calls: list[ModelCall] = []
        self._loss: str | None = None
        self._keeps = False
        self._rank = FoundRank()
        # What is read, and a copy of it as it was then.
        self._found: dict[str, tuple[torch.Tensor, int, torch.Tensor]] = {}

    @property
    def has_reads(self) -> bool:
        """Whether the loss reads anything."""
        return bool(self._found)

    def outputs(self) -> dict[str, torch.Tensor]:
        """The tensors that are read, by the name of their output: on all ranks in one order."""
        return {
            READ + key: tensor.detach().clone() if version_of(tensor) == version else copied
            for key, (tensor, version, copied) in sorted(self._found.items())
        }

    def replay(
        self, run: Callable[[nn.Module, dict[str, Any]], Any], fixed: Mapping[str, Any]
    ) -> Replay:
        """The loss as it was recorded."""
        calls, reads = tuple(self._calls), {key: READ + key for key in self._found}
        loss = self._loss if self._is_exact else None
        return Replay(run, dict(fixed), calls, reads, loss, self._keeps)

    def record(self, run: Run, batch: Mapping[str, Any], state: LossState) -> Any:
        """Run the loss, and where this explores, with several made-up values of what it reads.

        Args:
            run: runs it.
            batch: with its columns.
            state: Python state that it may change.

        Returns:
            The loss, as `run` returns it, of the first run.

        Raises:
            ReadDecides: what is read decides it.
        """
        given: list[Any] = []

        def call(module: nn.Module, model_runs: Run) -> Any:
            with self._rank.found(None):
                given.append(model_runs())
            self._calls.append(ModelCall.of(given[-1]))
            return given[-1]

        self._calls.clear()
        self._found.clear()
        first, ran = self._run(run, batch, call, lambda line: _NUMBERS[0], state, None)
        self._loss, left = ran.loss, state.changes()
        has_more = ran.lines or self.has_effects or left or self._rank.is_read
        if not (self._explores and has_more):
            return first
        if not state.restore():
            if self._rank.is_read and is_distributed():
                raise ReadDecides(
                    "compute_loss asks for the rank of the process, and writes into tensors that "
                    "it keeps; write on all ranks, into tensors that it makes."
                )
            return first

        results, made = [tree_map(_detached, one) for one in given], KnownResults()

        def again(numbers: Numbers) -> str:
            returned = iter(results)
            with _quiet():
                ran = self._run(run, batch, lambda *_: next(returned), numbers, state, made)[1]
            return ran.loss

        self._explore(ran.lines, again, state, left)
        with suppress(Exception):  # which the rehearsal explains
            again(lambda line: _NUMBERS[0])
        return first

    def _explore(
        self,
        lines: list[str],
        again: Callable[[Numbers], str],
        state: LossState,
        left: Sequence[StateLeft],
    ) -> None:
        """Run the loss with other numbers, which must not decide it, for all that it may read.

        Args:
            lines: that the first run read values at.
            again: runs it.
            state: as of `record`.
            left: what the first run has left.
        """

        def loss_with(numbers: Numbers) -> str | None:
            try:
                return again(numbers)
            except Exception:  # of arithmetic with a number that is none of its kind
                return self._loss
            finally:
                state.restore()

        for numbers in _NUMBERS[1:] if lines else ():
            if loss_with(partial(_numbers_at, numbers, lines)) == self._loss:
                continue
            alone = (n for n in dict.fromkeys(lines)
                     if loss_with(partial(_numbers_at, numbers, [n])) != self._loss)  # fmt: skip
            raise ReadDecides(
                f"compute_loss reads a value of a tensor at {with_text(next(alone, lines[0]))}, "
                "which decides its loss; a trace has no values: compute with the tensor itself, "
                "choose with torch.where, or mark the function with merak.eager_loss, which runs "
                "it as Python behind its calls of the model."
            )
        if is_distributed() and self._rank.is_read:
            with self._rank.found(1):
                loss = loss_with(lambda line: _NUMBERS[0])
            if loss != self._loss:
                # Where replicas meet, it may: then nothing of it is left to a step.
                raise ReadDecides(
                    "compute_loss asks for the rank of the process, and computes another loss on "
                    "rank 1 than on rank 0, where all ranks run pieces of one graph; only log or "
                    "keep values by it."
                )
        for owner, key, old in ((one.place.owner, one.key, one.old) for one in left):
            if type(old) not in (int, float) or type(owner) is not dict:
                continue
            counter = Counter(old)
            owner[key] = watched(old, counter)
            loss_with(lambda line: _NUMBERS[0])
            for value in counter.values():
                owner[key] = value
                loss_with(lambda line: _NUMBERS[0])

    def _run(
        self,
        run: Run,
        batch: Mapping[str, Any],
        call: Callable[[nn.Module, Run], Any],
        numbers: Numbers,
        state: LossState,
        made: KnownResults | None,
    ) -> tuple[Any, _Ran]:
        def output(tensor: torch.Tensor, key: str) -> None:
            if key not in self._found:
                self._found[key] = tensor, version_of(tensor), tensor.detach().clone()

        def answer(tensor: torch.Tensor, key: str) -> torch.Tensor:
            output(tensor, key)
            return made_up(tensor, numbers(reads.lines[-1]))

        reads = HostReads(call, answer, self._is_exact, self._numbers, made=made)
        reads.name_columns(batch)
        token = _RECORDING.set(self)
        try:
            with self._rank.replaced(), self._rank.found(self._rank.instead or 0), reads.followed():
                found = run()
        finally:
            _RECORDING.reset(token)
        for left in state.changes():
            for tensor, _ in kept_tensors(left.new, left.put):
                self._keeps = True
                output(tensor, reads.key_of_kept(tensor))
        loss = loss_in(found)
        return found, _Ran(reads.lines, reads.key(loss) if loss is not None else "")


def rehearse(
    replay: Replay, model: nn.Module, columns: Mapping[str, TensorMeta], device: torch.device
) -> None:
    """Run a recorded loss again as a step will, with made-up values.

    Args:
        replay: the loss.
        model: as of `Replay`.
        columns: as of `Replay`.
        device: as of `Replay`.

    Raises:
        ReadDecides: it fails.
    """
    token = _RECORDING.set(HostReadsRecorder(()))
    try:
        with restored_state(model, replay.run), _quiet():
            replay.run_again(model, columns, lambda tensor, _: made_up(tensor), device)
    except Exception as error:
        lines = [f"{f.filename}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)
                 if not is_library(f.filename)]  # fmt: skip
        raise ReadDecides(
            "compute_loss reads values of tensors, or leaves something in Python state, and cannot "
            f"run again behind its calls of the model, at {with_text(lines[-1])} ({error}); take "
            "gradients through the model in its forward."
        ) from error
    finally:
        _RECORDING.reset(token)


Numbers = Callable[[str], tuple[float, int, bool]]
"""Made-up values of what is read at a line."""


@dataclass(frozen=True, slots=True)
class _Ran:
    lines: list[str]
    loss: str


def _numbers_at(
    numbers: tuple[float, int, bool], lines: Collection[str], line: str
) -> tuple[float, int, bool]:
    """Numbers at some lines; those of the first run at any other."""
    return numbers if line in lines else _NUMBERS[0]


@contextmanager
def unheard() -> Iterator[FoundRank]:
    """Context in which a loss runs for its value alone, as on rank 0, and nothing is shown.

    Gives what says whether the rank is asked for.
    """
    token, rank = _RECORDING.set(HostReadsRecorder(())), FoundRank()
    try:
        with _quiet(), rank.replaced(), rank.found(0):
            yield rank
    finally:
        _RECORDING.reset(token)


@contextmanager
def _quiet() -> Iterator[None]:
    """Context in which nothing is shown of made-up numbers."""
    before = logging.root.manager.disable
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(StringIO()))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.callback(logging.disable, before)
        logging.disable(logging.CRITICAL)
        yield


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def made_up(tensor: torch.Tensor, numbers: tuple[float, int, bool] = _NUMBERS[0]) -> torch.Tensor:
    """Values in the place of those of a fake tensor.

    Args:
        tensor: the fake tensor.
        numbers: values of a floating, a whole and a boolean one.
    """
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        kind = 0 if tensor.is_floating_point() else 2 if tensor.dtype is torch.bool else 1
        value = numbers[kind]
        if kind == 1:  # of a small type
            limits = torch.iinfo(tensor.dtype)
            value = min(max(value, limits.min), limits.max)
        return torch.full(tuple(tensor.shape), value, dtype=tensor.dtype, device="cpu")
