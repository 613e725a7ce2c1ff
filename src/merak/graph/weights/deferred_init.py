"""Deferred initialisation: a tape of the constructor's operators, replayed on a real device.

Parameters of a model without weights are meta tensors, whose initial values follow from the
operators that the constructor ran. The tape records those operators with every tensor's view of its
storage, so that mutations through views and `.data` count. One parameter is then computed by the
few operators that its storage depends on, and no others run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from merak.core.errors import WeightsError
from merak.graph.ir.mutation import written_values
from merak.graph.ir.operators import OVERWRITES, UNINITIALIZED, draws, family


@dataclass(frozen=True, slots=True)
class StorageView:
    """Layout of a tensor in its storage.

    Args:
        storage: the number of the storage on its tape.
        shape: sizes of the dims.
        strides: elements between neighbours along each dim.
        offset: elements before the first.
        dtype: element type.
    """

    storage: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class InitOperator:
    """Recorded operator that created or changed a tensor.

    Args:
        op: what to call.
        args: its arguments, with a `StorageView` for every tensor.
        kwargs: its keyword arguments, likewise.
        outputs: for each tensor it returned, its place; None where the storage was there before.
        reads: storages whose contents it may read.
        writes: storages it creates or changes.
        overwrites: the storage of which it leaves nothing as it was, if any.
        is_random: whether it draws random numbers.
    """

    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[StorageView | None, ...]
    reads: frozenset[int]
    writes: frozenset[int]
    overwrites: int | None
    is_random: bool


class InitTape:
    """Tape of one construction: the recorded operators in order, and their storages."""

    def __init__(self) -> None:
        self.operators: list[InitOperator] = []
        self.num_bytes: list[int] = []
        self.constants: dict[int, torch.Tensor] = {}
        self.unknown: set[int] = set()
        self._writers: dict[int, list[int]] = {}

    def add(self, operator: InitOperator) -> None:
        """Append a recorded operator."""
        for storage in operator.writes:
            self._writers.setdefault(storage, []).append(len(self.operators))
        self.operators.append(operator)

    def needed(self, view: StorageView) -> list[int]:
        """Indices of the operators that the tensor at `view` depends on, in order."""
        return sorted(self._trace([view.storage])[0])

    def knows(self, view: StorageView) -> bool:
        """Whether every storage that `view` depends on was made under the tape."""
        return not self.unknown & self.touched([view])

    def touched(self, views: Iterable[StorageView]) -> set[int]:
        """Storages that the tensors at `views` depend on."""
        return self._trace([view.storage for view in views])[1]

    def forget_all_but(self, views: Iterable[StorageView]) -> None:
        """Free the constants that none of `views` depends on."""
        kept = self.touched(views)
        self.constants = {k: value for k, value in self.constants.items() if k in kept}

    def _trace(self, storages: list[int]) -> tuple[set[int], set[int]]:
        """The operators behind the final contents of `storages`, and all storages they touch."""
        chosen: set[int] = set()
        touched: set[int] = set(storages)
        wanted = [(storage, len(self.operators)) for storage in storages]
        while wanted:
            storage, end = wanted.pop()
            for index in reversed(self._writers.get(storage, [])):
                if index >= end:
                    continue
                operator = self.operators[index]
                if index not in chosen:
                    chosen.add(index)
                    touched |= operator.reads
                    wanted.extend((read, index) for read in operator.reads)
                if operator.overwrites == storage:
                    break
        return chosen, touched


class InitRecorder(TorchDispatchMode):
    """Dispatch mode that records every operator that creates or changes a tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = InitTape()
        self._storages: dict[StorageWeakRef, int] = {}
        self._labels: dict[int, str] = {}
        self._paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        for tensor in inputs:
            self.view_of(tensor)
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            if inputs or family(func) not in UNINITIALIZED:
                raise self._explain(func, inputs, error) from error
            # More than this machine could ever hold: a parameter, which needs no memory.
            result = func(*args, **{**kwargs, "device": "meta"})
        changed = [
            self.view_of(t).storage for t in written_values(func, args, kwargs) if _is_tensor(t)
        ]
        created = self._number_outputs(result)
        if created or changed:
            kwargs = _portable(func, kwargs, inputs, result)
            self._record(func, args, kwargs, result, created, frozenset(changed))
        return result

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which nothing is recorded."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def call(
        self, function: Callable[..., Any], tensor: torch.Tensor, *args: Any, is_random: bool
    ) -> torch.Tensor:
        """Record one call of a function that fills `tensor`, not the operators inside it.

        For functions that look at what they drew and draw again, since a list of operators would
        fix how often; and for values that are read from a file. Nothing is left of what `tensor`
        held before.
        """
        view = self.view_of(tensor)
        if not tensor.is_meta:
            with self.paused():
                function(tensor, *args)
        whole = self._covers(view)
        self.tape.add(
            InitOperator(
                op=function,
                args=(view, *args),
                kwargs={},
                outputs=(),
                reads=frozenset(() if whole else (view.storage,)),
                writes=frozenset((view.storage,)),
                overwrites=view.storage if whole else None,
                is_random=is_random,
            )
        )
        return tensor

    def view_of(self, tensor: torch.Tensor) -> StorageView:
        """Storage view of a tensor; one that the tape has not met is recorded by value."""
        storage = tensor.untyped_storage()
        key = StorageWeakRef(storage)
        number = self._storages.get(key)
        if number is None:
            number = self._number(key, storage)
            if tensor.is_meta:
                self.tape.unknown.add(number)
            else:
                flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
                with torch.no_grad():
                    self.tape.constants[number] = flat.set_(storage.clone())
        strides, offset = tensor.stride(), int(tensor.storage_offset())
        return StorageView(number, tuple(tensor.shape), strides, offset, tensor.dtype)

    def label(self, tensor: torch.Tensor, label: str) -> None:
        """Name a tensor, for messages."""
        self._labels.setdefault(self.view_of(tensor).storage, label)

    def _explain(
        self, func: torch._ops.OpOverload, inputs: list[torch.Tensor], error: Exception
    ) -> Exception:
        views = [self.view_of(t) for t in inputs if t.is_meta]
        if not views:
            return error
        storages = sorted(self.tape.touched(views))
        labels = [self._labels[storage] for storage in storages if storage in self._labels]
        return WeightsError(
            f"The constructor looks at the numbers of {labels[0] if labels else 'a parameter'} "
            f"({func}), which are not there under merak.empty_weights; build this model normally."
        )

    def _number(self, key: StorageWeakRef, storage: torch.UntypedStorage) -> int:
        self._storages[key] = len(self.tape.num_bytes)
        self.tape.num_bytes.append(storage.nbytes())
        return self._storages[key]

    def _number_outputs(self, result: Any) -> frozenset[int]:
        created = set()
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            key = StorageWeakRef(storage)
            if key not in self._storages:
                created.add(self._number(key, storage))
        return frozenset(created)

    def _record(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        created: frozenset[int],
        changed: frozenset[int],
    ) -> None:
        args, kwargs = tree_map(lambda x: self.view_of(x) if _is_tensor(x) else x, (args, kwargs))
        reads = {x.storage for x in tree_leaves((args, kwargs)) if isinstance(x, StorageView)}
        overwrites = self._overwritten(func, args)
        outputs = [self.view_of(t) for t in tree_leaves(result) if _is_tensor(t)]
        self.tape.add(
            InitOperator(
                op=func,
                args=args,
                kwargs=kwargs,
                outputs=tuple(p if p.storage in created else None for p in outputs),
                reads=frozenset(reads - {overwrites}),
                writes=created | changed,
                overwrites=overwrites,
                is_random=draws(func),
            )
        )

    def _overwritten(self, func: torch._ops.OpOverload, args: tuple[Any, ...]) -> int | None:
        if family(func) not in OVERWRITES or not isinstance(args[0], StorageView):
            return None
        target = args[0]
        others = {x.storage for x in tree_leaves(args[1:]) if isinstance(x, StorageView)}
        if target.storage in others or not self._covers(target):
            return None
        return target.storage

    def _covers(self, view: StorageView) -> bool:
        """Whether a tensor is all of its storage (strides of an expanded tensor are refused)."""
        whole = math.prod(view.shape) * view.dtype.itemsize == self.tape.num_bytes[view.storage]
        return whole and all(s > 0 for s, n in zip(view.strides, view.shape) if n > 1)


def replay(
    tape: InitTape, view: StorageView, device: torch.device, before_draw: Callable[[int], None]
) -> torch.Tensor:
    """Tensor at `view`, computed on a real device by the operators it depends on.

    Args:
        tape: the tape.
        view: a tensor of the tape.
        device: where the numbers are to be.
        before_draw: sets the random state of `device`; gets the index of the record that draws.

    Returns:
        A tensor of that shape and dtype; memory that the constructor never wrote is zero.
    """
    memory = _Storages(tape, device)
    with torch.no_grad():
        for index in tape.needed(view):
            operator = tape.operators[index]
            if operator.is_random:
                before_draw(index)
            args, kwargs = tree_map(memory.real, (operator.args, operator.kwargs))
            if "device" in kwargs:
                kwargs["device"] = device
            result = operator.op(*args, **kwargs)
            if family(operator.op) in UNINITIALIZED:  # memory is replayed as zeros
                result.zero_()
            tensors = [t for t in tree_leaves(result) if _is_tensor(t)]
            for output, tensor in zip(operator.outputs, tensors):
                if output is not None:
                    memory.bind(output, tensor)
        return memory.tensor(view)


class _Storages:
    """Storages of a replay on a real device, by their numbers on the tape."""

    def __init__(self, tape: InitTape, device: torch.device) -> None:
        self._tape = tape
        self._device = device
        self._storages: dict[int, torch.UntypedStorage] = {}

    def real(self, x: Any) -> Any:
        """Tensor at a storage view; anything else as it is."""
        return self.tensor(x) if isinstance(x, StorageView) else x

    def tensor(self, view: StorageView) -> torch.Tensor:
        """Tensor at a storage view."""
        if view.storage not in self._storages:
            self._storages[view.storage] = self._allocate(view.storage)
        tensor = torch.empty(0, dtype=view.dtype, device=self._device)
        storage = self._storages[view.storage]
        return tensor.set_(storage, view.offset, view.shape, view.strides)

    def bind(self, view: StorageView, tensor: torch.Tensor) -> None:
        """Use a tensor just made as the one at its storage view."""
        storage = tensor.untyped_storage()
        layout = (tensor.stride(), tensor.storage_offset(), storage.nbytes())
        if layout == (view.strides, view.offset, self._tape.num_bytes[view.storage]):
            self._storages[view.storage] = storage
        else:
            self.tensor(view).copy_(tensor)

    def _allocate(self, storage: int) -> torch.UntypedStorage:
        constant = self._tape.constants.get(storage)
        if constant is not None:
            return constant.to(self._device, copy=True).untyped_storage()
        size = self._tape.num_bytes[storage]
        return torch.empty(size, dtype=torch.uint8, device=self._device).untyped_storage()


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def _portable(
    func: torch._ops.OpOverload, kwargs: dict[str, Any], inputs: list[torch.Tensor], result: Any
) -> dict[str, Any]:
    """Keyword arguments that mean the same on another device, under another default dtype."""
    names = {argument.name for argument in func._schema.arguments}
    portable = {k: v for k, v in kwargs.items() if k not in ("generator", "pin_memory")}
    if not inputs and isinstance(result, torch.Tensor):
        fixed = {"dtype": result.dtype, "device": result.device}
        portable.update({k: v for k, v in fixed.items() if k in names})
    return portable
