"""What a rank holds at every moment: its list of steps, walked through on paper.

The walk does with bytes what the engine does with tensors: the same storages are taken and given
up by the same steps. A storage that several hold, such as an activation that two segments read and
that is being sent, counts once.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum


class Part(Enum):
    """What a rank holds bytes for."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    BUFFERS = "buffers"
    COLUMNS = "columns"
    ACTIVATIONS = "activations"
    COMMUNICATION = "communication"
    TEMPORARY = "temporary"

    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Moment:
    """What a rank holds when it holds most.

    Args:
        at: the step, such as `B3`; "update" for the optimizer's step.
        total_bytes: all of it.
        parts: of it, by what it is for.
    """

    at: str
    total_bytes: int
    parts: Mapping[Part, int]


@dataclass(slots=True)
class _Held:
    num_bytes: int
    part: Part
    stage: int | None
    holders: int = 0


@dataclass(slots=True)
class Ledger:
    """What is held, by whom, and the most of it so far."""

    parts: Counter[Part] = field(default_factory=Counter)
    total_bytes: int = 0
    peak: Moment | None = None
    # Per stage: what its microbatches hold now, and have held at most.
    by_stage: Counter[int] = field(default_factory=Counter)
    stage_peaks: Counter[int] = field(default_factory=Counter)
    _held: dict[Hashable, _Held] = field(default_factory=dict)

    def hold(
        self, key: Hashable, num_bytes: int, part: Part = Part.ACTIVATIONS, stage: int | None = None
    ) -> None:
        """One more holder of a storage; the first one takes the bytes."""
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = _Held(num_bytes, part, stage)
            self._add(part, stage, num_bytes)
        held.holders += 1

    def again(self, key: Hashable) -> None:
        """One more holder of a storage that is held already."""
        self._held[key].holders += 1

    def release(self, key: Hashable) -> None:
        """One holder less; the last one gives the bytes back."""
        held = self._held[key]
        held.holders -= 1
        if held.holders == 0:
            del self._held[key]
            self._add(held.part, held.stage, -held.num_bytes)

    def has(self, key: Hashable) -> bool:
        """Whether somebody holds a storage."""
        return key in self._held

    def bytes_of(self, key: Hashable) -> int:
        """The size of a storage that somebody holds."""
        return self._held[key].num_bytes

    def release_all(self, keys: Iterable[Hashable]) -> None:
        """One holder less of each."""
        for key in keys:
            self.release(key)

    def look(self, at: str, taken_bytes: int = 0, stage: int | None = None) -> None:
        """Note the moment, if it is the highest: what is held, and what is taken meanwhile."""
        total = self.total_bytes + taken_bytes
        if stage is not None:
            level = self.by_stage[stage] + taken_bytes
            self.stage_peaks[stage] = max(self.stage_peaks[stage], level)
        if self.peak is None or total > self.peak.total_bytes:
            parts = dict(self.parts)
            parts[Part.TEMPORARY] = parts.get(Part.TEMPORARY, 0) + taken_bytes
            self.peak = Moment(at, total, parts)

    def settle(self, part: Part, num_bytes: int) -> None:
        """A part has come down to so much, whoever held it."""
        self.total_bytes += num_bytes - self.parts[part]
        self.parts[part] = num_bytes

    def _add(self, part: Part, stage: int | None, num_bytes: int) -> None:
        self.parts[part] += num_bytes
        self.total_bytes += num_bytes
        if stage is not None:
            self.by_stage[stage] += num_bytes
            self.stage_peaks[stage] = max(self.stage_peaks[stage], self.by_stage[stage])


class Window:
    """Storages that stay until so many newer ones have come, as sends do.

    Args:
        ledger: where they are held.
        size: how many groups may stay.
    """

    def __init__(self, ledger: Ledger, size: int) -> None:
        self._ledger = ledger
        self._size = size
        self._open: deque[list[Hashable]] = deque()

    def add(self, keys: list[Hashable]) -> None:
        """A group that is held already by whoever hands it over."""
        self._open.append(keys)
        if len(self._open) > self._size:
            self._ledger.release_all(self._open.popleft())

    def close(self) -> None:
        """Let all go."""
        while self._open:
            self._ledger.release_all(self._open.popleft())
