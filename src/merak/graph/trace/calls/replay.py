"""Replays of a loss: it runs again behind a step, on fake tensors, with the values that it reads.

A job has as many runs as microbatches in all replicas, so the fakes of one shape are the same in
each (`FakeMicrobatch`), and a function that is called on tensors that came about alike does not run
again, unless the loss writes into tensors (`KnownResults`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from merak.core.errors import TrainingError
from merak.core.source_lines import model_line, with_text
from merak.core.tensor_meta import TensorMeta
from merak.graph.trace.calls.host_reads import HostReads, KnownResults, Run, loss_in
from merak.graph.trace.modes.replica_collectives import replica_collectives
from merak.graph.trace.state.rank_reads import RankReads
from merak.graph.trace.state.snapshot import Snapshot

_REPLAYS: ContextVar[bool] = ContextVar("_REPLAYS", default=False)


def is_replayed() -> bool:
    """Whether the loss runs again, behind a step."""
    return _REPLAYS.get()


@contextmanager
def replayed() -> Iterator[None]:
    """Context in which the loss runs again, behind a step."""
    token = _REPLAYS.set(True)
    try:
        yield
    finally:
        _REPLAYS.reset(token)


@dataclass(frozen=True, slots=True, eq=False)
class ModelCall:
    """Result of a call of a module with parameters, without values."""

    spec: TreeSpec
    leaves: tuple[Any, ...]  # Layout of a tensor, else the value itself

    @staticmethod
    def of(result: Any) -> ModelCall:
        """The call that has returned this."""
        leaves, spec = tree_flatten(result)
        return ModelCall(spec, tuple(Layout.of(leaf) for leaf in leaves))

    def tensors(self) -> list[Any]:
        """Leaves of such layouts."""
        return [one.made() if isinstance(one, Layout) else one for one in self.leaves]

    def made(self, leaves: Sequence[Any] | None = None) -> Any:
        """A result of such layouts.

        Args:
            leaves: as of `tensors`; None to make them.
        """
        return tree_unflatten(self.tensors() if leaves is None else leaves, self.spec)


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a tensor that a module has returned."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @staticmethod
    def of(leaf: Any) -> Any:
        """The layout of a tensor; anything else as it is."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        size, stride = tuple(leaf.shape), tuple(leaf.stride())
        return Layout(size, stride, leaf.dtype, leaf.device, leaf.requires_grad)

    def made(self) -> torch.Tensor:
        """A tensor of this layout."""
        found = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)
        return found.requires_grad_(self.requires_grad)


@dataclass(slots=True, eq=False)
class FakeMicrobatch:
    """Fake tensors that a loss runs on, the same each time it does.

    Args:
        mode: makes them.
        batch: by column.
        results: leaves of what each call of the model returns.
        made: what functions have made of them; None where the loss writes into tensors, so that
            each run has tensors of its own.
    """

    mode: FakeTensorMode
    batch: dict[str, Any]
    results: list[list[Any]]
    made: KnownResults | None = field(default_factory=KnownResults)

    @staticmethod
    def of(
        columns: Mapping[str, TensorMeta], calls: Sequence[ModelCall], device: torch.device
    ) -> FakeMicrobatch:
        """Make them.

        Args:
            columns: of the microbatch.
            calls: of the model.
            device: that they claim to be on.
        """
        # Where values decide a size, as in x[mask], it has a symbol.
        mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)
        with mode:
            batch: dict[str, Any] = {
                name: torch.empty(meta.shape, dtype=meta.dtype, device=device)
                for name, meta in columns.items()
            }
            return FakeMicrobatch(mode, batch, [one.tensors() for one in calls])


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """A traced loss, to be run again with the values of a microbatch.

    Args:
        run: the loss function, `run(model, batch)`.
        fixed: arguments in every batch that are no tensors.
        calls: of the model, and what each returned.
        reads: outputs of the graph by the description of the tensor that is read.
        loss: description of the loss; None where numbers of Python are inputs of the graph, of
            which there are descriptions in a trace alone.
        keeps: whether the loss leaves tensors in Python state.
        fakes: that it has run on, by shapes and device.
    """

    run: Callable[[nn.Module, dict[str, Any]], Any]
    fixed: Mapping[str, Any]
    calls: tuple[ModelCall, ...]
    reads: Mapping[str, str]
    loss: str | None
    keeps: bool
    fakes: dict[Any, FakeMicrobatch] = field(default_factory=dict)

    def __call__(
        self,
        model: nn.Module,
        columns: Mapping[str, TensorMeta],
        values: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> None:
        """Run the loss for what it does besides.

        Args:
            model: the user's, which is not called.
            columns: of the microbatch.
            values: on the host, by the names of the graph's outputs.
            device: that fake tensors claim to be on.

        Raises:
            TrainingError: as of `run_again`.
        """
        with replayed():
            self.run_again(model, columns, lambda tensor, name: values[name], device)

    def run_again(
        self,
        model: nn.Module,
        columns: Mapping[str, TensorMeta],
        value: Callable[[torch.Tensor, str], torch.Tensor],
        device: torch.device,
    ) -> None:
        """Run the loss on fake tensors.

        Args:
            model: as of `__call__`.
            columns: as of `__call__`.
            value: gives the values of a tensor, on the host, by the name of the graph's output.
            device: as of `__call__`.

        Raises:
            TrainingError: it reads what it did not read when it was traced, or what it has read
                decides its loss.
        """

        def answer(tensor: torch.Tensor, key: str) -> torch.Tensor:
            name = self.reads.get(key)
            if name is None:
                raise _otherwise("reads a tensor that it has not read")
            return value(tensor, name)

        before = Snapshot.of_loss(self.run) if self.keeps else None
        fakes = self._fakes(columns, device)
        returned = iter(zip(self.calls, fakes.results, strict=True))

        def call(module: nn.Module, _: Run) -> Any:
            known = next(returned, None)
            if known is None:
                raise _otherwise("calls the model more often than")
            return known[0].made(known[1])

        reads = HostReads(call, answer, is_exact=self.loss is not None, made=fakes.made)
        loss = run_on_fakes(self.run, model, self.fixed, fakes, reads)
        if self.loss is not None and reads.key(loss) != self.loss:
            where = f", such as at {with_text(reads.lines[-1])}" if reads.lines else ""
            raise TrainingError(
                "compute_loss computes another loss in this step than when it was traced, as what "
                f"it reads of tensors decides{where}; choose with torch.where."
            )
        for left in () if before is None else before.changes():
            for tensor, put in kept_tensors(left.new, left.put):
                found = answer(tensor, reads.key_of_kept(tensor)).to(device, copy=True)
                put(_written(left.old, found) if tensor is left.new else found)

    def _fakes(self, columns: Mapping[str, TensorMeta], device: torch.device) -> FakeMicrobatch:
        """Fake tensors to run on: those of before, where nothing has been written into them."""
        key = tuple(columns.items()), device
        known = self.fakes.get(key)
        if known is None or known.made is None or known.made.results is None:
            is_first = known is None and self.loss is not None
            known = self.fakes[key] = FakeMicrobatch.of(columns, self.calls, device)
            known.made = known.made if is_first else None
        return known


def run_on_fakes(
    run: Callable[[nn.Module, dict[str, Any]], Any],
    model: nn.Module,
    fixed: Mapping[str, Any],
    fakes: FakeMicrobatch,
    reads: HostReads,
    mode: AbstractContextManager[Any] | None = None,
) -> Any:
    """Run a loss on a microbatch of fake tensors.

    Args:
        run: the loss function, `run(model, batch)`.
        model: the user's, which is not called.
        fixed: arguments in every batch that are no tensors.
        fakes: the microbatch.
        reads: gives what the loss reads, and what its model returns.
        mode: a further context, inside of what makes tensors fake.

    Returns:
        The loss.
    """
    reads.name_columns(fakes.batch)
    ranks = RankReads(training=model.training, keeps_rank=True)
    inside = nullcontext() if mode is None else mode
    with ranks.recorded(), replica_collectives(ranks), fakes.mode, inside, reads.followed():
        return loss_in(run(model, {**fakes.batch, **fixed}))


def kept_tensors(
    value: Any, put: Callable[[Any], None], depth: int = 0
) -> Iterator[tuple[torch.Tensor, Callable[[Any], None]]]:
    """Fake tensors that a loss has left in Python state, and what puts another in its place."""
    if isinstance(value, FakeTensor):
        yield value, put
        return
    items: Any = ()
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, (list, deque)):
        items = list(enumerate(value))
    for key, one in items if depth < _MAX_DEPTH else ():
        yield from kept_tensors(one, partial(value.__setitem__, key), depth + 1)


_MAX_DEPTH = 8


def _written(old: Any, value: torch.Tensor) -> torch.Tensor:
    """A value, in the tensor whose place it takes where that is one of its kind, as in a trace."""
    is_kind = type(old) is torch.Tensor and not old.requires_grad
    if not is_kind or (old.shape, old.dtype) != (value.shape, value.dtype):
        return value
    found: torch.Tensor = old.copy_(value)
    return found


def _otherwise(what: str) -> TrainingError:
    return TrainingError(
        f"compute_loss {what} when it was traced, at {with_text(model_line())}, as a value that it "
        "has read before decides; do that whatever the value is, and decide afterwards."
    )
