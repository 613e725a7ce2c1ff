"""Host reads of a loss: values that it takes out of tensors, as `.item()` does.

A loss of the script's own (`compute_loss` of a trainer) may read values and do anything with them:
append them to lists, log them. Traced, it has no values. So each tensor that it reads becomes one
more output of the graph, and the read gives a made-up number. Once a step has run, the loss runs
again on fake tensors for each microbatch (`Replay`): what the model returned is fake too, of the
same shapes, and each read gives the value that the graph has computed.

That holds as long as no value that is read decides what is computed. Both runs therefore describe
how each tensor came about; what is read is found again by that description. While it is traced, the
loss runs with several made-up numbers (`loss_recorder`), and the loss must be described alike each
time; so it must be in all later runs.

A job has as many runs as microbatches in all replicas, so the fakes of one shape are the same in
each (`FakeMicrobatch`), and a function that is called on tensors that came about alike does not run
again, unless the loss writes into tensors.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.types import py_sym_types
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from merak.core.errors import TrainingError
from merak.core.source_lines import model_line, with_text
from merak.core.tensor_meta import TensorMeta
from merak.graph.trace.modes.replica_collectives import replica_collectives
from merak.graph.trace.state.rank_reads import RankReads
from merak.graph.trace.state.snapshot import Snapshot

READ = "read: "
"""Beginning of the names of outputs that are read on the host."""

_READS = frozenset(
    getattr(torch.Tensor, name)
    for name in (
        "item tolist numpy is_nonzero __float__ __int__ __bool__ __index__ __format__ __array__"
    ).split()
)
"""Functions that give a tensor's values to Python."""

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


Run = Callable[[], Any]
"""Runs the loss, and returns it or a tuple that it is the first of."""


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
        made: what functions have made of them, by their descriptions; None where the loss writes
            into tensors, so that each run has tensors of its own.
    """

    mode: FakeTensorMode
    batch: dict[str, torch.Tensor]
    results: list[list[Any]]
    made: dict[Any, Any] | None = field(default_factory=dict)

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
            batch = {
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

        reads = HostReads(call, answer, is_exact=self.loss is not None, fakes=fakes)
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
        if known is None or known.made is None or self.loss is None:
            was_written = known is not None and known.made is None
            known = self.fakes[key] = FakeMicrobatch.of(columns, self.calls, device)
            known.made = None if was_written or self.loss is None else known.made
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


@contextmanager
def model_calls(
    answer: Callable[[nn.Module, Run], Any], model: nn.Module | None = None
) -> Iterator[None]:
    """Context in which a loss runs whose calls of its model are answered.

    Args:
        answer: gives the result of a call of a module that has parameters, and is inside of no
            other; its second argument makes the call.
        model: the model; a module that has it inside, such as a loss, is called as it is.
    """
    original = nn.Module.__call__
    is_inside = False

    def is_around(module: nn.Module) -> bool:
        return module is not model and any(one is model for one in module.modules())

    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_inside

        def run() -> Any:
            return original(module, *args, **kwargs)

        if is_inside or next(module.parameters(), None) is None or is_around(module):
            return run()
        is_inside = True
        try:
            return answer(module, run)
        finally:
            is_inside = False

    with (
        mock.patch.object(nn.Module, "__call__", called),
        # Which cuts a loader's last batch by state that changes; a microbatch has no padding.
        mock.patch.object(Accelerator, "gather_for_metrics", lambda self, data, *_, **__: data),
    ):
        yield


class HostReads(TorchFunctionMode):
    """Function mode that gives what a loss reads of tensors, and what its model returns.

    Args:
        call: gives the result of a call of a module that has parameters.
        answer: gives the values of a tensor that is read, by its description.
        is_exact: whether what is read is found again by how it came about; else by the line that
            reads it, and by how often it has.
        numbers: tensors that stand for numbers of Python, and are read as without this mode.
        model: as of `model_calls`.
        fakes: remember what functions make of them; None where each function runs.
    """

    def __init__(
        self,
        call: Callable[[nn.Module, Run], Any],
        answer: Callable[[torch.Tensor, str], torch.Tensor],
        is_exact: bool,
        numbers: Collection[torch.Tensor] = (),
        model: nn.Module | None = None,
        fakes: FakeMicrobatch | None = None,
    ) -> None:
        super().__init__()
        self._model, self._fakes = model, fakes
        self._is_plain = True  # what has been described last, of which nothing is left out
        self.lines: list[str] = []
        self.given = ""  # description of what the function that runs is given
        self._call, self._answer, self._is_exact = call, answer, is_exact
        self._is_inside = False  # a call of the model
        self._num_calls = self._num_kept = 0
        # With the tensor itself, whose identity is then no other's, and its version.
        self._keys: dict[int, tuple[torch.Tensor, str, int]] = {}
        self._of_numbers: set[int] = set()
        for tensor in numbers:
            self._note(tensor, "number")
            self._of_numbers.add(id(tensor))

    def name_columns(self, batch: Mapping[str, Any]) -> None:
        """Describe the tensors of a batch by their columns."""
        for name, value in batch.items():
            if isinstance(value, torch.Tensor):
                self._note(value, f"column {name}")

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Context in which the loss runs."""
        with model_calls(self._called, self._model), self:
            yield

    def _called(self, module: nn.Module, run: Run) -> Any:
        """The result of a call of the model, whose tensors are described."""
        self._is_inside = True
        try:
            made = self._call(module, run)
        finally:
            self._is_inside = False
        for number, leaf in enumerate(tree_leaves(made)):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf, f"output {number} of call {self._num_calls}")
        self._num_calls += 1
        return made

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer a read; describe what any other function returns."""
        kwargs = kwargs or {}
        if self._is_inside:
            return func(*args, **kwargs)
        if func in _READS and self._has_no_values(args[0]):
            return self._read(func, args[0], args[1:], kwargs)
        self._is_plain = True
        before = self.given = self._described((args, kwargs))
        result = self._result(func, before, args, kwargs)
        self._describe(result, func, before, (args, kwargs))
        return result

    def _result(self, func: Any, before: str, args: Any, kwargs: Any) -> Any:
        """What a function returns, or has returned for tensors that came about alike."""
        fakes = self._fakes
        if fakes is None or fakes.made is None:
            return func(*args, **kwargs)
        modes = torch.is_grad_enabled(), *map(torch.is_autocast_enabled, ("cpu", "cuda"))
        key = func, before, modes
        if self._is_plain and key in fakes.made:
            return fakes.made[key]
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        versions = [version_of(tensor) for tensor in given]
        result = func(*args, **kwargs)
        found = result if isinstance(result, (tuple, list)) else (result,)
        if versions != [version_of(tensor) for tensor in given]:
            fakes.made = None
        elif (
            self._is_plain
            and type(result) in (FakeTensor, tuple)
            and all(type(one) is FakeTensor and not _is_among(one, given) for one in found)
        ):
            fakes.made[key] = result
        return result

    def _has_no_values(self, tensor: Any) -> bool:
        is_fake = isinstance(tensor, FakeTensor) and tensor.constant is None
        return is_fake and id(tensor) not in self._of_numbers

    def _read(self, func: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
        line = model_line()
        key = self.key(tensor) if self._is_exact else f"{line} {self.lines.count(line)}"
        self.lines.append(line)
        values = self._answer(tensor, key)
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return func(values, *args, **kwargs)

    def key_of_kept(self, tensor: torch.Tensor) -> str:
        """Description of a tensor that the loss leaves in Python state."""
        if self._is_exact:
            return self.key(tensor)
        self._num_kept += 1
        return f"kept {self._num_kept}"

    # ---- descriptions ----

    def is_described(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is of the batch, of the model, or made of such in this mode."""
        return id(tensor) in self._keys

    def key(self, tensor: torch.Tensor) -> str:
        """Description of how a tensor came about, as it is now."""
        version = version_of(tensor)
        known = self._keys.get(id(tensor))
        if known is None:  # which no function has made: a tensor that the loss's own objects hold
            return self._note(tensor, f"tensor {tuple(tensor.shape)} {tensor.dtype}")
        if known[2] != version:  # written through another view of it
            return self._note(tensor, _hash(f"{known[1]} written {version - known[2]}"))
        return known[1]

    def _note(self, tensor: torch.Tensor, key: str) -> str:
        self._keys[id(tensor)] = tensor, key, version_of(tensor)
        return key

    def _describe(self, result: Any, func: Any, before: str, given: Any) -> None:
        found = tree_leaves(result) if isinstance(result, (tuple, list)) else (result,)
        if not any(isinstance(leaf, torch.Tensor) for leaf in found):
            return
        held = getattr(func, "__self__", None)  # of the getter of a property
        name = f"{getattr(held, '__name__', '')}.{getattr(func, '__name__', type(func).__name__)}"
        made = _hash(f"{name} {before}")
        tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
        is_of_number = bool(tensors) and all(id(one) in self._of_numbers for one in tensors)
        for number, leaf in enumerate(found):
            if isinstance(leaf, torch.Tensor):
                known = self._keys.get(id(leaf))
                if known is None or known[2] != version_of(leaf) or not _is_among(leaf, given):
                    self._note(leaf, f"{made} {number}")
                if is_of_number:
                    self._of_numbers.add(id(leaf))

    def _described(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return self.key(value)
        if isinstance(value, (tuple, list)):
            return f"({', '.join(map(self._described, value))})"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{k}: {self._described(v)}' for k, v in value.items())}}}"
        if isinstance(value, (*_PLAIN, *py_sym_types)):
            return str(value)
        self._is_plain = False
        return type(value).__name__


_PLAIN = (
    int,
    float,
    complex,
    bool,
    str,
    type(None),
    torch.dtype,
    torch.device,
    slice,
    torch.layout,
)


def _is_among(tensor: torch.Tensor, given: Any) -> bool:
    return any(leaf is tensor for leaf in tree_leaves(given))


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def version_of(tensor: torch.Tensor) -> int:
    """Number of writes into a tensor."""
    with torch._C.DisableTorchFunction():
        return 0 if tensor.is_inference() else int(tensor._version)


def loss_in(result: Any) -> Any:
    """The loss in what a loss function returns; None for none."""
    return result[0] if isinstance(result, tuple) else result
