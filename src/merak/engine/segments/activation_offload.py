"""Activation offloading: tensors saved for backward, copied to host memory and back.

What a segment's forward saves is copied to the host while the next segment computes,
and is then freed on the device; it is copied back during the backward of the segment after it. One
storage is copied once, however many tensors view it, and comes back as one. On a GPU copies run
on streams of their own, from and to pinned memory that torch's allocator reuses;
the CPU makes the same copies at once.

A storage that is being copied stays on the device until the segment that computes meanwhile has
ended: then computation waits for the copy. So the device never holds more of them than one
segment's, and a link that is too slow shows as time and not as memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from merak.core.errors import TrainingError
from merak.core.storages import can_move, storages_of
from merak.engine.segments.copy_streams import CopyQueue, StreamCopies, SyncCopies


@dataclass(slots=True, weakref_slot=True, eq=False)
class _OffloadedStorage:
    """A storage that a forward saved: on the device, in host memory or being copied.

    Args:
        source: the storage as the forward made it.
        on_device: its bytes on the device; None while they are in host memory alone.
        host: its bytes in host memory.
        copied: the mark of the copy to the host.
        is_needed: whether its backward is near, so that it stays on the device.
    """

    source: weakref.ref[torch.UntypedStorage]
    on_device: torch.Tensor | None
    host: torch.Tensor | None = None
    copied: Any = None
    is_needed: bool = False


@dataclass(frozen=True, slots=True)
class _SavedView:
    """A saved tensor, as a view of an offloaded storage."""

    stored: _OffloadedStorage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class _SavedTensor:
    """A saved tensor that stays on the device, and its version; later writes are an error."""

    tensor: torch.Tensor
    version: int

    def unwritten(self) -> torch.Tensor:
        """The tensor, if nobody has written into it: with hooks, autograd does not check."""
        if self.tensor._version != self.version:
            raise TrainingError(
                f"a tensor of shape {tuple(self.tensor.shape)} that the backward needs was written "
                "in place after the forward had saved it, so its gradients would be wrong; let the "
                "model write into a copy."
            )
        return self.tensor


@dataclass(slots=True)
class OffloadedTensors:
    """The offloaded tensors of one segment's forward for one microbatch.

    Args:
        storages: those that the backward still needs.
        saved: tensors that were saved, until `offload_saved` has checked them.
        fetched: the mark of the copies back, once they have begun.
        is_fetching: whether they have begun.
    """

    storages: list[weakref.ref[_OffloadedStorage]] = field(default_factory=list)
    saved: list[_SavedTensor] = field(default_factory=list)
    fetched: Any = None
    is_fetching: bool = False

    def alive(self) -> list[_OffloadedStorage]:
        """The storages that the backward still needs."""
        return [stored for ref in self.storages if (stored := ref()) is not None]


class ActivationOffload:
    """Offloads saved tensors to host memory and fetches them, for all stages of a rank.

    Args:
        device: where it is computed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        on_gpu = device.type == "cuda"
        self._out: CopyQueue = StreamCopies(device) if on_gpu else SyncCopies()
        self._back: CopyQueue = StreamCopies(device) if on_gpu else SyncCopies()
        self._next: list[_OffloadedStorage] = []
        self._copying: list[_OffloadedStorage] = []
        # By address of the storage, for segments that save the same one.
        self._known: weakref.WeakValueDictionary[int, _OffloadedStorage] = (
            weakref.WeakValueDictionary()
        )

    def pack(
        self,
        tensors: Iterable[torch.Tensor],
        offloaded: OffloadedTensors,
        held: Iterable[torch.Tensor],
    ) -> list[Any]:
        """Collect saved tensors to be offloaded; what stands for each, for `unpacked`.

        Args:
            tensors: that are saved.
            offloaded: gains the storages to offload.
            held: tensors that are on the device anyway.
        """
        stays = storages_of(held)
        return [self._packed(tensor, offloaded, stays) for tensor in tensors]

    def _packed(self, tensor: Any, offloaded: OffloadedTensors, stays: frozenset[int]) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        saved = _SavedTensor(tensor.detach(), tensor._version)  # itself, it might hold itself
        if not can_move(tensor, self._device, stays):
            return saved
        offloaded.saved.append(saved)
        stored = self._find(tensor.untyped_storage(), offloaded)
        return _SavedView(
            stored, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset())
        )

    def _find(
        self, storage: torch.UntypedStorage, offloaded: OffloadedTensors
    ) -> _OffloadedStorage:
        stored = self._known.get(storage._cdata)
        if stored is None or stored.source() is not storage:
            on_device = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
            stored = self._known[storage._cdata] = _OffloadedStorage(
                weakref.ref(storage), on_device
            )
        if all(ref() is not stored for ref in offloaded.storages):
            offloaded.storages.append(weakref.ref(stored))
        return stored

    def offload_saved(self, offloaded: OffloadedTensors, held: Iterable[torch.Tensor]) -> None:
        """Queue a segment's saved tensors; the next `segment_ended` begins to copy them.

        Args:
            offloaded: of the segment.
            held: tensors that turned out to be on the device anyway.

        Raises:
            TrainingError: the segment has written into a saved tensor.
        """
        stays = storages_of(held)
        while offloaded.saved:
            offloaded.saved.pop().unwritten()
        for stored in offloaded.alive():
            storage = stored.source()
            if storage is not None and storage._cdata in stays:
                stored.is_needed = True  # it is not copied at all
            elif stored.host is None and not stored.is_needed:
                self._next.append(stored)

    def segment_ended(self) -> None:
        """Free the storages copied while a segment ran, and copy the next ones."""
        if self._copying:
            self._out.wait(self._copying[-1].copied)
        for stored in self._copying:
            if not stored.is_needed:
                stored.on_device = None
        self._copying = [stored for stored in self._next if not stored.is_needed]
        self._next.clear()
        pairs = []
        for stored in self._copying:
            assert stored.on_device is not None
            stored.host = self._in_host(stored.on_device.numel())
            pairs.append((stored.host, stored.on_device))
        copied = self._out.copy(pairs) if pairs else None
        for stored in self._copying:
            stored.copied = copied

    def prefetch(self, offloaded: OffloadedTensors) -> None:
        """Begin to copy offloaded tensors back, if that has not begun."""
        wanted = [stored for stored in offloaded.alive() if not stored.is_needed]
        for stored in wanted:
            stored.is_needed = True  # what has not left yet stays
        in_host = [stored for stored in wanted if stored.on_device is None]
        pairs = []
        for stored in in_host:
            assert stored.host is not None
            # Memory of the stream that will read it and free it.
            stored.on_device = torch.empty(
                stored.host.numel(), dtype=torch.uint8, device=self._device
            )
            pairs.append((stored.on_device, stored.host))
        if in_host:
            offloaded.fetched = self._back.copy(pairs, [stored.copied for stored in in_host])
            offloaded.is_fetching = True
        for stored in in_host:
            stored.host = None

    def fetch(self, offloaded: OffloadedTensors) -> None:
        """Copy offloaded tensors back, and wait for the copies."""
        self.prefetch(offloaded)
        if offloaded.is_fetching:
            self._back.wait(offloaded.fetched)

    def forget(self) -> None:
        """Free the storages of a step that failed."""
        for queue in (self._out, self._back):
            queue.drain()  # memory that is freed now must not be written or read any more
        self._next.clear()
        self._copying.clear()

    def _in_host(self, num_bytes: int) -> torch.Tensor:
        return _host_memory(num_bytes, self._device)


def reserve_host_memory(device: torch.device, blocks: Mapping[int, int]) -> None:
    """Pin memory that torch's allocator has for the first step, whose copies would wait for it.

    Args:
        device: where it is computed; memory is pinned for a GPU alone.
        blocks: numbers of blocks by their bytes.
    """
    if device.type == "cuda":
        reserved = [_host_memory(size, device) for size in blocks for _ in range(blocks[size])]
        reserved.clear()  # to the allocator, all at once


def _host_memory(num_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


@torch.no_grad()
def unpacked(saved: Any) -> Any:
    """A saved tensor, once its storage has been fetched.

    Args:
        saved: what stands for it.
    """
    if isinstance(saved, _SavedTensor):
        return saved.unwritten()
    if not isinstance(saved, _SavedView):  # a number
        return saved
    view = saved
    assert view.stored.on_device is not None, "what a backward asks for is still in host memory"
    tensor = torch.empty(0, dtype=view.dtype, device=view.stored.on_device.device)
    storage = view.stored.on_device.untyped_storage()
    return tensor.set_(storage, view.offset, view.size, view.stride)
