"""Files of a disk that hold an optimizer's states, and what it steps.

Between steps every tensor is a view of a file that is mapped into memory, which the system reads
where something asks for it, such as a checkpoint. A step reads the next tensors into aligned
buffers and writes the last ones in two threads, past the system's cache of files where the file
system can, while the processor steps those between. The file has no name, so that nothing of it
stays behind a job that ends, however it ends.

Source: arXiv 2104.07857 (ZeRO-Infinity), section 6.3.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from merak.core.errors import TrainingError
from merak.core.storages import memory_of
from merak.core.units import size

PAGE_BYTES = 4096
"""Bytes at whose multiples regions and buffers start, as reads past the cache need it."""

_Call = Callable[[int, Sequence[memoryview], int], int]
"""Reads or writes some memory of a file from a place on; returns how many bytes."""

_MOST_WRITES = 2
"""Groups of tensors that may be on their way to the file."""


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor in the file.

    Args:
        start: of its bytes.
        mapped: the tensor, as the system maps it.
    """

    start: int
    mapped: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of its region."""
        return _aligned(self.mapped.nbytes)


class StateFile:
    """A file without a name, in which tensors are read and written beside other work.

    Args:
        folder: of the file; made where there is none.

    Raises:
        TrainingError: no file can be made there.
    """

    def __init__(self, folder: str) -> None:
        self._folder, self._end = folder, 0
        try:
            os.makedirs(folder, exist_ok=True)
            self._file, name = tempfile.mkstemp(prefix="merak-optimizer-", dir=folder)
            self._direct = _open_direct(name, self._file)
            os.unlink(name)
        except OSError as error:
            raise TrainingError(
                f"offload_optimizer={folder!r} cannot have a file for the optimizer's states: "
                f"{error.strerror}; name a folder that every rank may write in."
            ) from error
        self._reader, self._writer = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._writes: deque[Future[None]] = deque()
        for number in {self._file, self._direct}:
            weakref.finalize(self, os.close, number)

    def new(self, like: torch.Tensor) -> FileTensor:
        """A tensor in the file, of zeros.

        Args:
            like: has its shape and type.

        Raises:
            TrainingError: the disk is full.
        """
        start, num_bytes = self._end, _aligned(like.nbytes)
        try:
            if num_bytes:
                os.posix_fallocate(self._file, start, num_bytes)
        except OSError as error:
            raise self._full(error, num_bytes) from error
        self._end += num_bytes
        if not num_bytes:
            return FileTensor(start, torch.empty(like.shape, dtype=like.dtype))
        pages = mmap.mmap(self._file, num_bytes, offset=start)
        flat = torch.frombuffer(pages, dtype=like.dtype, count=like.numel())
        return FileTensor(start, flat.view(like.shape))

    def read(self, tensors: Sequence[FileTensor]) -> Future[list[torch.Tensor]]:
        """Begin to read tensors into memory of their own; the result has them."""
        return self._reader.submit(self._read, tensors)

    def write(self, pairs: Sequence[tuple[FileTensor, torch.Tensor]]) -> None:
        """Begin to write tensors, which must not change until `finish`; waits for earlier ones."""
        while len(self._writes) >= _MOST_WRITES:
            self._writes.popleft().result()
        self._writes.append(self._writer.submit(self._write, pairs))

    def finish(self) -> None:
        """Wait until everything is written.

        Raises:
            TrainingError: the disk has failed.
        """
        while self._writes:
            self._writes.popleft().result()

    def _read(self, tensors: Sequence[FileTensor]) -> list[torch.Tensor]:
        found = []
        for own in tensors:
            buffer = _buffer(own.num_bytes)
            self._move(os.preadv, memory_of(buffer), own.start)
            found.append(_as_tensor(buffer, own.mapped))
        return found

    def _write(self, pairs: Sequence[tuple[FileTensor, torch.Tensor]]) -> None:
        for own, tensor in pairs:
            buffer = _aligned_copy(tensor, own.num_bytes)  # has to outlive its bytes
            self._move(os.pwritev, memory_of(buffer), own.start)

    def _move(self, call: _Call, memory: memoryview, start: int) -> None:
        """Read or write all of some memory; a call may do a part of it."""
        done = 0
        while done < len(memory):
            try:
                count = call(self._direct, [memory[done:]], start + done)
            except OSError as error:
                raise self._full(error, len(memory)) from error
            if not count:
                raise TrainingError(f"the file of offload_optimizer={self._folder!r} ends early.")
            done += count

    def _full(self, error: OSError, num_bytes: int) -> TrainingError:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return TrainingError(
                f"the file of offload_optimizer={self._folder!r} cannot be used: {error.strerror}; "
                "use a folder on another disk, and resume from the last checkpoint."
            )
        return TrainingError(
            f"the disk of offload_optimizer={self._folder!r} is full: it has {size(self._end)} of "
            f"this rank's optimizer, and no room for {size(num_bytes)} more; free some, or use a "
            "folder on a larger disk, and resume from the last checkpoint."
        )


def _open_direct(name: str, plain: int) -> int:
    """The file opened past the system's cache; the plain one where the file system cannot."""
    try:
        return os.open(name, os.O_RDWR | os.O_DIRECT)
    except OSError:
        return plain


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def _buffer(num_bytes: int) -> torch.Tensor:
    """Memory that starts at a multiple of `PAGE_BYTES`."""
    whole = torch.empty(num_bytes + PAGE_BYTES, dtype=torch.uint8)
    return whole[-whole.data_ptr() % PAGE_BYTES :][:num_bytes]


def _aligned_copy(tensor: torch.Tensor, num_bytes: int) -> torch.Tensor:
    """A tensor's bytes in an aligned buffer: its own memory, where a buffer was read into it."""
    storage, start = tensor.untyped_storage(), tensor.storage_offset() * tensor.element_size()
    fits = tensor.is_contiguous() and start + num_bytes <= storage.nbytes()
    if fits and tensor.data_ptr() % PAGE_BYTES == 0:
        whole = torch.empty(0, dtype=torch.uint8).set_(storage)
        return whole[start : start + num_bytes]
    buffer = _buffer(num_bytes)
    _as_tensor(buffer, tensor).copy_(tensor)
    return buffer


def _as_tensor(buffer: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return buffer[: like.nbytes].view(like.dtype).view(like.shape)


class FileStates:
    """The states of an optimizer in a file, a part of which is in memory while it is stepped.

    Args:
        file: has them.
        own: by tensor that is stepped, its place in the file.
    """

    def __init__(self, file: StateFile, own: Mapping[torch.Tensor, FileTensor]) -> None:
        self._file, self._own = file, own
        self._places: dict[tuple[torch.Tensor, str], FileTensor] = {}
        self._coming: Future[list[torch.Tensor]] | None = None

    def prefetch(self, optimizer: torch.optim.Optimizer, part: Sequence[torch.Tensor]) -> None:
        """Begin to read what a part needs."""
        self._coming = self._file.read([place for *_, place in self._in_file(optimizer, part)])

    def enter(self, optimizer: torch.optim.Optimizer, part: Sequence[torch.Tensor]) -> None:
        """Have a part, which was prefetched, in memory."""
        assert self._coming is not None
        read = self._coming.result()
        for (tensor, key, _), value in zip(self._in_file(optimizer, part), read, strict=True):
            if key:
                optimizer.state[tensor][key] = value
            else:
                tensor.data = value

    def leave(self, optimizer: torch.optim.Optimizer, part: Sequence[torch.Tensor]) -> None:
        """Begin to write a part that was stepped."""
        pairs = []
        for tensor in part:
            if tensor in self._own:
                pairs.append((self._own[tensor], tensor.data))
                tensor.data = self._own[tensor].mapped
            state = optimizer.state.get(tensor, {})
            for key, value in state.items():
                if not isinstance(value, torch.Tensor) or value.shape != tensor.shape:
                    continue
                place = self._places.get((tensor, key))
                if place is None or place.mapped.dtype != value.dtype:
                    place = self._places[tensor, key] = self._file.new(value)
                pairs.append((place, value.detach()))
                state[key] = place.mapped
        self._file.write(pairs)

    def finish(self) -> None:
        """Wait until everything is written."""
        self._file.finish()

    def _in_file(
        self, optimizer: torch.optim.Optimizer, part: Sequence[torch.Tensor]
    ) -> list[tuple[torch.Tensor, str, FileTensor]]:
        """What is in the file of a part: tensors, with the key of a state of it, or "".

        A state that a checkpoint was loaded into is in memory, and newer.
        """
        found = []
        for tensor in part:
            if tensor in self._own:
                found.append((tensor, "", self._own[tensor]))
            for key, value in optimizer.state.get(tensor, {}).items():
                place = self._places.get((tensor, key))
                if place is not None and place.mapped.data_ptr() == value.data_ptr():
                    found.append((tensor, key, place))
        return found
