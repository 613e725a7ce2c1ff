"""Offloaded activations in the memory timeline, as `engine.segments.activation_offload` moves them.

A segment's activations stay on the device until the segment that computes while they are copied has
ended, are on the device again from when the copy back begins, and go with the segment's backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from merak.graph.program.program import SegmentProgram
from merak.plan.cost.segment_memory import SegmentMemory
from merak.plan.memory.ledger import Ledger

Keys = Mapping[str, Hashable]
"""Values by name, and the storage each lies in; None for one that costs nothing."""


@dataclass(slots=True)
class AwayRecord:
    """What one segment's forward saved for one microbatch.

    Args:
        held: what stays on the device until the backward.
        moved: what waits in host memory.
    """

    held: list[Hashable] = field(default_factory=list)
    moved: list[Hashable] = field(default_factory=list)


@dataclass(slots=True)
class HostMemory:
    """All that a rank's segments keep in host memory.

    Args:
        device: what is held on the device.
        peak_bytes: the most that has been in host memory at a time.
    """

    device: Ledger
    peak_bytes: int = 0
    _bytes: int = 0
    _next: list[Hashable] = field(default_factory=list)
    _leaving: list[Hashable] = field(default_factory=list)
    # By storage: its size, the records that wait for it, and those that are in host memory.
    _sizes: dict[Hashable, tuple[int, int]] = field(default_factory=dict)
    _waiting: Counter[Hashable] = field(default_factory=Counter)
    _in_host: set[Hashable] = field(default_factory=set)
    _back: set[Hashable] = field(default_factory=set)

    def forward(
        self,
        segment: SegmentProgram,
        memory: SegmentMemory,
        place: tuple[int, int],
        values: Keys,
    ) -> AwayRecord:
        """A segment has run forward.

        Args:
            segment: the segment.
            memory: what it needs.
            place: its stage and the microbatch.
            values: its inputs and outputs, which are all on the device still.
        """
        assert segment.offload is not None
        stays = {values.get(name) for name in segment.offload}
        record, stage = AwayRecord(), place[0]
        left = ("saved", *place, segment.segment.index)
        self.device.hold(left, memory.left_bytes, stage=stage)
        record.held.append(left)
        own = ("moved", *place, segment.segment.index)
        self.device.hold(own, memory.moved_bytes, stage=stage)
        self._send(own, stage, record)
        for name in memory.moved_values:
            key = values.get(name)
            if key is None or key in (*record.held, *record.moved):
                continue
            self.device.again(key)
            if key in stays:
                record.held.append(key)
            elif key in self._waiting:  # another segment has saved it, too
                self.device.release(key)
                self._waiting[key] += 1
                record.moved.append(key)
            else:
                self._send(key, stage, record)
        return record

    def _send(self, key: Hashable, stage: int, record: AwayRecord) -> None:
        self._sizes[key] = (self.device.bytes_of(key), stage)
        self._waiting[key] += 1
        self._next.append(key)
        record.moved.append(key)

    def turn(self) -> None:
        """A segment's forward or backward has ended."""
        for key in self._leaving:
            self.device.release(key)
        self._leaving, self._next = self._next, []
        for key in self._leaving:
            self._in_host.add(key)
            self._bytes += self._sizes[key][0]
        self.peak_bytes = max(self.peak_bytes, self._bytes)

    def fetch(self, record: AwayRecord | None) -> None:
        """Copies of a record's storages back begin; nothing where that has happened."""
        for key in () if record is None else record.moved:
            if key in self._back:
                continue
            self._back.add(key)
            size, stage = self._sizes[key]
            for _ in range(self._waiting[key]):
                self.device.hold(("back", key), size, stage=stage)
            for list_of in (self._next, self._leaving):
                if key in list_of:  # it stays, and its copy counts for nothing
                    list_of.remove(key)
                    self.device.release(key)
            if key in self._in_host:
                self._in_host.remove(key)
                self._bytes -= size

    def release(self, records: Sequence[AwayRecord]) -> None:
        """The backwards of some records have ended."""
        for record in records:
            self.device.release_all(record.held)
            for key in record.moved:
                self.device.release(("back", key))
                self._waiting[key] -= 1
                if not self._waiting[key]:
                    del self._waiting[key], self._sizes[key]
                    self._back.discard(key)
