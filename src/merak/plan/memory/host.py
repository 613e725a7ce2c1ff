"""Host memory of a rank: what is there, and offloaded activations in the memory timeline.

A segment's activations stay on the device until the segment that runs beside their copy has ended,
are on the device again once the copy back begins, and are released with the segment's backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from merak.graph.program.program import SegmentProgram
from merak.plan.cost.segments.memory import SegmentMemory
from merak.plan.memory.ledger import Ledger
from merak.plan.optimizer.home import MOST_SENT, folder_of, in_parts, shared_out

Keys = Mapping[str, Hashable]
"""Storage of each value by name; None for one that costs nothing."""


def block_bytes(size: int) -> int:
    """Bytes of pinned memory that torch's allocator takes for a storage: the next power of two."""
    return 1 << max(size - 1, 0).bit_length()


@dataclass(frozen=True, slots=True)
class HostBytes:
    """Bytes of a rank in host memory, beside its process.

    Args:
        activations: offloaded ones, at their peak.
        optimizer: its states, masters, and copies of what it steps; of those in files what is read
            ahead, stepped and written, with gradients.
        gradients: that step it, in memory.
        pinned: of pinned buffers beyond these: rounding, and tensors on their way to the device.
    """

    activations: int = 0
    optimizer: int = 0
    gradients: int = 0
    pinned: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.activations + self.optimizer + self.gradients + self.pinned


@dataclass(frozen=True, slots=True)
class OffloadedTensor:
    """A tensor that an optimizer steps in host memory or files.

    Args:
        state: bytes of its states, its master included, or of its copy.
        gradient: bytes of its gradient, which has the shape and type of what is stepped.
        sent: bytes that go back to the device once it is stepped.
        is_late: whether its steps are delayed: of its gradient and of what is sent there are two.
    """

    state: int
    gradient: int
    sent: int
    is_late: bool = False

    @property
    def gradients(self) -> int:
        """Bytes of its gradients, which step it and which arrive meanwhile."""
        return self.gradient * (2 if self.is_late else 1)

    @property
    def total(self) -> int:
        """Bytes that are not on the device."""
        return self.state + self.gradients + (2 * self.sent if self.is_late else 0)

    @property
    def pinned(self) -> int:
        """Bytes that pinned buffers take, beyond its own, for what it holds all the time."""
        buffers = [self.gradient, self.gradient, self.sent, self.sent]
        return sum(block_bytes(n) - n for n in (buffers if self.is_late else buffers[:1]))


def host_bytes(
    home: str | None, tensors: Sequence[OffloadedTensor], activations: HostMemory, is_pinned: bool
) -> tuple[HostBytes, int]:
    """What a rank has in host memory, and bytes in files.

    Args:
        home: the option `offload_optimizer`.
        tensors: that its optimizer steps there.
        activations: its offloaded activations.
        is_pinned: whether a device copies to and from pinned memory, as a GPU does.
    """
    in_memory, in_files = shared_out(home, [own.total for own in tensors])
    gradients = 0 if folder_of(home) else sum(own.gradients for own in tensors)
    pinned = 0
    if is_pinned:
        pinned = sum(size * count for size, count in activations.blocks.items())
        pinned -= activations.peak_bytes
        if gradients:
            pinned += sum(own.pinned for own in tensors)
        pinned += _staged_bytes([own for own in tensors if not own.is_late])
    found = HostBytes(activations.peak_bytes, in_memory - gradients, gradients, pinned)
    return found, in_files


def _staged_bytes(tensors: Sequence[OffloadedTensor]) -> int:
    """Bytes of the pinned buffers through which stepped tensors go to the device."""
    parts = in_parts([own.gradient for own in tensors])
    blocks = Counter[int]()
    for last in range(len(parts)):
        there = parts[max(0, last - MOST_SENT) : last + 1]
        blocks |= Counter(block_bytes(tensors[n].sent) for part in there for n in part)
    return sum(size * count for size, count in blocks.items())


@dataclass(slots=True)
class OffloadRecord:
    """Saved storages of one segment and microbatch.

    Args:
        held: those that stay on the device until the backward.
        offloaded: those in host memory.
    """

    held: list[Hashable] = field(default_factory=list)
    offloaded: list[Hashable] = field(default_factory=list)


@dataclass(slots=True)
class HostMemory:
    """Offloaded activations of a rank's segments.

    Args:
        device: ledger of the device.
        peak_bytes: peak of the bytes in host memory.
        blocks: most storages that are in host memory at once, by `block_bytes`.
    """

    device: Ledger
    peak_bytes: int = 0
    blocks: Counter[int] = field(default_factory=Counter)
    _bytes: int = 0
    _blocks: Counter[int] = field(default_factory=Counter)
    _next: list[Hashable] = field(default_factory=list)
    _leaving: list[Hashable] = field(default_factory=list)
    # By key: sizes of its storages and its stage, and how many records need it; and those in host
    # memory.
    _sizes: dict[Hashable, tuple[Sequence[int], int]] = field(default_factory=dict)
    _users: Counter[Hashable] = field(default_factory=Counter)
    _in_host: set[Hashable] = field(default_factory=set)
    _back: set[Hashable] = field(default_factory=set)

    def forward(
        self,
        segment: SegmentProgram,
        memory: SegmentMemory,
        place: tuple[int, int],
        values: Keys,
    ) -> OffloadRecord:
        """Record the forward of a segment.

        Args:
            segment: the segment.
            memory: its bytes.
            place: its stage and the microbatch.
            values: its inputs and outputs, all of them on the device still.
        """
        assert segment.offload is not None
        stays = {values.get(name) for name in segment.offload}
        record, stage = OffloadRecord(), place[0]
        resident = ("saved", *place, segment.segment.index)
        self.device.hold(resident, memory.resident_bytes, stage=stage)
        record.held.append(resident)
        own = ("offloaded", *place, segment.segment.index)
        self.device.hold(own, memory.offload_bytes, stage=stage)
        self._offload(own, memory.offload_sizes, stage, record)
        for name in memory.offload_values:
            key = values.get(name)
            if key is None or key in (*record.held, *record.offloaded):
                continue
            self.device.share(key)
            if key in stays:
                record.held.append(key)
            elif key in self._users:  # which another segment has saved, too
                self.device.release(key)
                self._users[key] += 1
                record.offloaded.append(key)
            else:
                self._offload(key, (self.device.bytes_of(key),), stage, record)
        return record

    def _offload(
        self, key: Hashable, sizes: Sequence[int], stage: int, record: OffloadRecord
    ) -> None:
        self._sizes[key] = (sizes, stage)
        self._users[key] += 1
        self._next.append(key)
        record.offloaded.append(key)

    def segment_ended(self) -> None:
        """Complete the open copies and begin the next ones, when a segment has run."""
        for key in self._leaving:
            self.device.release(key)
        self._leaving, self._next = self._next, []
        for key in self._leaving:
            self._in_host.add(key)
            self._bytes += sum(self._sizes[key][0])
            self._blocks.update(map(block_bytes, self._sizes[key][0]))
        self.peak_bytes = max(self.peak_bytes, self._bytes)
        self.blocks |= self._blocks

    def fetch(self, record: OffloadRecord | None) -> None:
        """Begin to copy a record's storages back, unless that has begun."""
        for key in () if record is None else record.offloaded:
            if key in self._back:
                continue
            self._back.add(key)
            sizes, stage = self._sizes[key]
            for _ in range(self._users[key]):
                self.device.hold(("back", key), sum(sizes), stage=stage)
            for queue in (self._next, self._leaving):
                if key in queue:  # it stays, and its copy counts for nothing
                    queue.remove(key)
                    self.device.release(key)
            if key in self._in_host:
                self._in_host.remove(key)
                self._bytes -= sum(sizes)
                self._blocks.subtract(map(block_bytes, sizes))

    def release(self, records: Sequence[OffloadRecord]) -> None:
        """Release the storages of some records, whose backwards have ended."""
        for record in records:
            self.device.release_all(record.held)
            for key in record.offloaded:
                self.device.release(("back", key))
                self._users[key] -= 1
                if not self._users[key]:
                    del self._users[key], self._sizes[key]
                    self._back.discard(key)
