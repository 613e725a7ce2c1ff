"""Ledger of the bytes that a rank holds, by storage and category, and the peak so far.

A storage that several hold, such as an activation that two segments read and that is being sent,
counts once.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from merak.schedule.ir import Action


class Category(Enum):
    """Use of a rank's bytes."""

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
class Peak:
    """The moment at which a rank holds the most bytes.

    Args:
        at: the step, such as `B3`; "update" for the optimizer's step.
        total_bytes: all of them.
        by_category: the same bytes by category.
    """

    at: str
    total_bytes: int
    by_category: Mapping[Category, int]


@dataclass(slots=True)
class _Held:
    num_bytes: int
    category: Category
    stage: int | None
    holders: int = 0


@dataclass(slots=True)
class Ledger:
    """Storages that a rank holds, with their holders, and the peak of their bytes.

    Args:
        label: text of an action, for the peak.
    """

    label: Callable[[Action], str] = str
    by_category: Counter[Category] = field(default_factory=Counter)
    total_bytes: int = 0
    # Per stage: bytes that its microbatches hold now, and have held at most.
    by_stage: Counter[int] = field(default_factory=Counter)
    stage_peaks: Counter[int] = field(default_factory=Counter)
    _held: dict[Hashable, _Held] = field(default_factory=dict)
    _peak: tuple[str | Action, int, dict[Category, int]] | None = None

    @property
    def peak(self) -> Peak | None:
        """The peak so far; None before the first."""
        if self._peak is None:
            return None
        at, total, by_category = self._peak
        return Peak(at if isinstance(at, str) else self.label(at), total, by_category)

    def hold(
        self,
        key: Hashable,
        num_bytes: int,
        category: Category = Category.ACTIVATIONS,
        stage: int | None = None,
    ) -> None:
        """Add a holder to a storage; the first holder adds its bytes."""
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = _Held(num_bytes, category, stage)
            self._add(category, stage, num_bytes)
        held.holders += 1

    def share(self, key: Hashable) -> None:
        """Add a holder to a storage that is held already."""
        self._held[key].holders += 1

    def release(self, key: Hashable) -> None:
        """Remove a holder from a storage; the last holder removes its bytes."""
        held = self._held[key]
        held.holders -= 1
        if held.holders == 0:
            del self._held[key]
            self._add(held.category, held.stage, -held.num_bytes)

    def has(self, key: Hashable) -> bool:
        """Whether a storage is held."""
        return key in self._held

    def bytes_of(self, key: Hashable) -> int:
        """Bytes of a storage that is held."""
        return self._held[key].num_bytes

    def release_all(self, keys: Iterable[Hashable]) -> None:
        """Remove a holder from each of some storages."""
        for key in keys:
            self.release(key)

    def record_peak(self, at: str | Action, taken_bytes: int = 0, stage: int | None = None) -> None:
        """Record the peak, if held bytes and those taken meanwhile are more than ever before."""
        total = self.total_bytes + taken_bytes
        if stage is not None:
            level = self.by_stage[stage] + taken_bytes
            self.stage_peaks[stage] = max(self.stage_peaks[stage], level)
        if self._peak is None or total > self._peak[1]:
            by_category = dict(self.by_category)
            temporary = by_category.get(Category.TEMPORARY, 0)
            by_category[Category.TEMPORARY] = temporary + taken_bytes
            self._peak = at, total, by_category

    def set_category(self, category: Category, num_bytes: int) -> None:
        """Set the bytes of a category, whatever its storages are."""
        self.total_bytes += num_bytes - self.by_category[category]
        self.by_category[category] = num_bytes

    def _add(self, category: Category, stage: int | None, num_bytes: int) -> None:
        self.by_category[category] += num_bytes
        self.total_bytes += num_bytes
        if stage is not None:
            self.by_stage[stage] += num_bytes
            self.stage_peaks[stage] = max(self.stage_peaks[stage], self.by_stage[stage])


class SendWindow:
    """Storages of open sends, each held until a number of later ones has been sent.

    Args:
        ledger: where they are held.
        size: open sends at a time.
    """

    def __init__(self, ledger: Ledger, size: int) -> None:
        self._ledger = ledger
        self._size = size
        self._open: deque[list[Hashable]] = deque()

    def add(self, keys: list[Hashable]) -> None:
        """Open a send of storages that the caller holds, and hands over."""
        self._open.append(keys)
        if len(self._open) > self._size:
            self._ledger.release_all(self._open.popleft())

    def close(self) -> None:
        """Release the storages of all open sends."""
        while self._open:
            self._ledger.release_all(self._open.popleft())
