"""Activations that wait for their backward in host memory.

What autograd saves in a segment's forward is copied to the host while the next segment computes,
and is then given up on the device; it is copied back while the segment before it goes backward. One
storage is copied once, however many tensors lie in it, and comes back as one. On a GPU copies run
on streams of their own, from and to pinned memory that torch's allocator keeps for the next time;
the CPU makes the same copies at once.

What is on its way out is held on the device until the segment that computes meanwhile has ended:
then computation waits for the copy. So the device never holds more of it than one segment's, and a
link that is too slow shows as time and not as memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from merak.core.errors import TrainingError
from merak.core.storages import can_move, storages_of
from merak.engine.segments.copy_streams import AtOnce, OnStream, Way
from merak.ops.sharded_saved import saved_by


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Moved:
    """One storage, on the device, in host memory or on its way; autograd's views keep it alive.

    Args:
        source: the storage as the forward made it.
        here: its bytes on the device; None while they are in host memory alone.
        host: its bytes in host memory.
        left: the mark of the copy to the host.
        is_wanted: whether its backward is near, so that it stays on the device.
    """

    source: weakref.ref[torch.UntypedStorage]
    here: torch.Tensor | None
    host: torch.Tensor | None = None
    left: Any = None
    is_wanted: bool = False


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor that autograd saved, as a part of a storage that moves."""

    moved: _Moved
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class _Seen:
    """A tensor as it was when autograd saved it; nobody may write into it after that."""

    tensor: torch.Tensor
    version: int

    def unwritten(self) -> torch.Tensor:
        """The tensor; autograd itself does not look where there are hooks."""
        if self.tensor._version != self.version:
            raise TrainingError(
                f"a tensor of shape {tuple(self.tensor.shape)} that the backward needs was written "
                "in place after the forward had saved it, so its gradients would be wrong; let the "
                "model write into a copy."
            )
        return self.tensor


@dataclass(slots=True)
class Stash:
    """What one segment's forward saved for one microbatch, as far as it moves.

    Args:
        storages: those that are still needed.
        seen: what was saved, until it has been given.
        came: the mark of the copies back, once they have begun.
        is_coming: whether they have.
    """

    storages: list[weakref.ref[_Moved]] = field(default_factory=list)
    seen: list[_Seen] = field(default_factory=list)
    came: Any = None
    is_coming: bool = False

    def alive(self) -> list[_Moved]:
        """What autograd still holds of it."""
        return [moved for ref in self.storages if (moved := ref()) is not None]


class Offload:
    """Moves what autograd saves to host memory and back, for all stages of a rank.

    Args:
        device: where it is computed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        on_gpu = device.type == "cuda"
        self._out: Way = OnStream(device) if on_gpu else AtOnce()
        self._back: Way = OnStream(device) if on_gpu else AtOnce()
        self._next: list[_Moved] = []
        self._leaving: list[_Moved] = []
        # By address of the storage, for segments that save the same one.
        self._known: weakref.WeakValueDictionary[int, _Moved] = weakref.WeakValueDictionary()

    @contextmanager
    def saving(self, stash: Stash, held: Iterable[torch.Tensor]) -> Iterator[None]:
        """Inside, what autograd saves goes to a stash.

        Args:
            stash: gains what moves.
            held: tensors that are on the device anyway.
        """
        stays = storages_of(held)

        def pack(tensor: torch.Tensor) -> Any:
            seen = _Seen(tensor.detach(), tensor._version)  # itself, it might hold itself
            if not can_move(tensor, self._device, stays):
                return seen
            stash.seen.append(seen)
            moved = self._find(tensor.untyped_storage(), stash)
            return _View(
                moved, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset())
            )

        with saved_by(pack, _unpack):
            yield

    def _find(self, storage: torch.UntypedStorage, stash: Stash) -> _Moved:
        moved = self._known.get(storage._cdata)
        if moved is None or moved.source() is not storage:
            here = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
            moved = self._known[storage._cdata] = _Moved(weakref.ref(storage), here)
        if all(ref() is not moved for ref in stash.storages):
            stash.storages.append(weakref.ref(moved))
        return moved

    def give(self, stash: Stash, held: Iterable[torch.Tensor]) -> None:
        """A segment has saved all it saves; the next `turn` begins to copy it.

        Args:
            stash: what it has saved.
            held: tensors that turned out to be on the device anyway.

        Raises:
            TrainingError: the segment has written into what it had saved.
        """
        stays = storages_of(held)
        while stash.seen:
            stash.seen.pop().unwritten()
        for moved in stash.alive():
            storage = moved.source()
            if storage is not None and storage._cdata in stays:
                moved.is_wanted = True  # it is not copied at all
            elif moved.host is None and not moved.is_wanted:
                self._next.append(moved)

    def turn(self) -> None:
        """A segment's forward or backward has ended: give up what has left meanwhile."""
        if self._leaving:
            self._out.wait(self._leaving[-1].left)
        for moved in self._leaving:
            if not moved.is_wanted:
                moved.here = None
        self._leaving = [moved for moved in self._next if not moved.is_wanted]
        self._next.clear()
        pairs = []
        for moved in self._leaving:
            assert moved.here is not None
            moved.host = self._in_host(moved.here.numel())
            pairs.append((moved.host, moved.here))
        left = self._out.copy(pairs) if pairs else None
        for moved in self._leaving:
            moved.left = left

    def begin_fetch(self, stash: Stash) -> None:
        """Begin to copy a stash back, if that has not begun."""
        wanted = [moved for moved in stash.alive() if not moved.is_wanted]
        for moved in wanted:
            moved.is_wanted = True  # what has not left yet stays
        away = [moved for moved in wanted if moved.here is None]
        pairs = []
        for moved in away:
            assert moved.host is not None
            # Memory of the stream that will read it and free it.
            moved.here = torch.empty(moved.host.numel(), dtype=torch.uint8, device=self._device)
            pairs.append((moved.here, moved.host))
        if away:
            stash.came = self._back.copy(pairs, [moved.left for moved in away])
            stash.is_coming = True
        for moved in away:
            moved.host = None

    def fetch(self, stash: Stash) -> None:
        """Have a stash back on the device."""
        self.begin_fetch(stash)
        if stash.is_coming:
            self._back.wait(stash.came)

    def forget(self) -> None:
        """Drop what a step that failed has left."""
        for way in (self._out, self._back):
            way.drain()  # memory that is given up now must not be written or read any more
        self._next.clear()
        self._leaving.clear()

    def _in_host(self, num_bytes: int) -> torch.Tensor:
        is_pinned = self._device.type == "cuda"
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)


@torch.no_grad()
def _unpack(saved: Any) -> torch.Tensor:
    if isinstance(saved, _Seen):
        return saved.unwritten()
    view: _View = saved
    assert view.moved.here is not None, "what autograd asks for is still in host memory"
    tensor = torch.empty(0, dtype=view.dtype, device=view.moved.here.device)
    storage = view.moved.here.untyped_storage()
    return tensor.set_(storage, view.offset, view.size, view.stride)


class _Entry(torch.autograd.Function):
    """An input of a segment; its gradient is left where it is looked for.

    A leaf would hold the input's memory until its backward.
    """

    @staticmethod
    def forward(ctx: Any, port: torch.Tensor, value: torch.Tensor, found: Any, name: str) -> Any:
        ctx.found, ctx.name = found, name
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Leave the gradient as it is laid out: kernels of other strides may round otherwise."""
        ctx.found[ctx.name] = gradient
        return None, None, None, None


@torch.enable_grad()
def enter(
    names: Sequence[str], values: Iterable[torch.Tensor], carries: Iterable[bool], found: Any
) -> list[torch.Tensor]:
    """The inputs of a segment whose backward leaves their gradients by name.

    Args:
        names: of the inputs.
        values: what they are.
        carries: whether a gradient goes back through each.
        found: gains the gradients.
    """
    inputs = []
    for name, value, carried in zip(names, values, carries, strict=True):
        # Something that requires a gradient, or autograd would not call the backward.
        port = torch.zeros((), device=value.device, requires_grad=True)
        own = value.detach()
        inputs.append(_Entry.apply(port, own, found, name) if carried else own)  # type: ignore[no-untyped-call]
    return inputs
