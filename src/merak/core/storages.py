"""Storages of tensors: the bytes that are alive while operators run on fake or real tensors."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Storages(TorchDispatchMode):
    """Mode that counts the storages that operators allocate inside, from first tensor to last.

    A view shares its storage with the whole, so nothing is counted twice. What exists before is
    not counted, if it is named; nor are sparse tensors, which have no storage.

    Args:
        known: tensors that exist already.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self._outer: Storages | None = None
        # By address of the storage: its size, and what tells when it goes.
        self._alive: dict[int, tuple[int, weakref.ref[Any] | None]] = {}
        self._known = [tensor.untyped_storage() for tensor in known]
        for storage in self._known:
            self._alive[storage._cdata] = (0, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator and count the storages of its results."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and is_dense(leaf):
                self._see(leaf)
        return result

    def __enter__(self) -> Self:
        global _counting
        self._outer, _counting = _counting, self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        global _counting
        _counting = self._outer
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def resized(self, tensor: torch.Tensor) -> None:
        """Count what `resize_storage` has made of a tensor's storage, as long as that is."""
        storage = tensor.untyped_storage()
        known = self._alive.get(storage._cdata)
        if known is None:
            self._see(tensor)
            return
        self._count(storage._cdata, storage.nbytes(), known[1])

    def _count(self, key: int, num_bytes: int, goes: weakref.ref[Any] | None) -> None:
        self.live_bytes += num_bytes - self._alive.get(key, (0, None))[0]
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self._alive[key] = (num_bytes, goes)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's storage was allocated inside and is counted."""
        return self._alive.get(tensor.untyped_storage()._cdata, (0, None))[1] is not None

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Exclude a tensor that was allocated inside, but on another device."""
        self._known.append(tensor.untyped_storage())
        self._alive[self._known[-1]._cdata] = (0, None)

    def restart(self) -> None:
        """Reset the peak to what is alive."""
        self.peak_bytes = self.live_bytes

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return

        def gone(_: object) -> None:
            self.live_bytes -= self._alive.pop(key, (0, None))[0]

        self._count(key, storage.nbytes(), weakref.ref(storage, gone))


_counting: Storages | None = None
"""The innermost mode that counts."""


def resize_storage(tensor: torch.Tensor, num_bytes: int) -> None:
    """Give a tensor's storage so many bytes of memory, or none, wherever else it is known."""
    tensor.untyped_storage().resize_(num_bytes)
    if _counting is not None:
        _counting.resized(tensor)


MIN_OFFLOADED_BYTES = 1024
"""Smaller storages stay: a copy would take longer than it is worth."""


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, which must outlive them.

    NumPy's view of a tensor would make torch refuse to resize it for ever, which the first forward
    of some models does to their buffers.
    """
    if not tensor.numel():
        return memoryview(b"")
    found = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(found).cast("B")


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether all elements of a tensor have a place in its storage: it is not sparse."""
    return tensor.layout is torch.strided


def num_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements, of a sparse one with 8 bytes for every index."""
    if is_dense(tensor):
        return tensor.nbytes
    return int(tensor._nnz()) * (tensor.element_size() + 8 * tensor.dim())


def storage_of(value: Any) -> int | None:
    """Return the identity of a tensor's storage; None for other values, and sparse tensors."""
    if not isinstance(value, torch.Tensor) or not is_dense(value):
        return None
    return int(value.untyped_storage()._cdata)


def storages_of(tensors: Iterable[torch.Tensor]) -> frozenset[int]:
    """Return the identities of the storages of some tensors."""
    return frozenset(tensor.untyped_storage()._cdata for tensor in tensors)


def can_move(tensor: torch.Tensor, device: torch.device, stays: frozenset[int]) -> bool:
    """Whether a tensor that autograd saves can be offloaded with its storage.

    Args:
        tensor: what is saved.
        device: where it is computed.
        stays: storages that are on the device anyway.
    """
    if not is_dense(tensor) or tensor.is_conj() or tensor.is_neg():
        return False
    if tensor.device.type != device.type or isinstance(tensor, torch.nn.Parameter):
        return False
    storage = tensor.untyped_storage()
    return storage.nbytes() >= MIN_OFFLOADED_BYTES and storage._cdata not in stays
