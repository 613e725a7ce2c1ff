"""What gradients of parameters take while a rank's steps are walked through."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from merak.graph.program.program import SegmentProgram
from merak.plan.memory.communication_limits import MAX_OPEN_BUCKETS
from merak.plan.memory.context import SharedHere, Surroundings, parameters_of
from merak.plan.memory.ledger import Ledger, Part, Window
from merak.schedule.ir import FINAL_KINDS, Action


@dataclass(slots=True)
class Gradients:
    """The gradients of a rank's parameters, as they come, are summed over replicas, and stay.

    Args:
        around: what the walk knows.
        ledger: what is held.
    """

    around: Surroundings
    ledger: Ledger
    _last: dict[int, int] = field(default_factory=dict)
    _exist: set[str] = field(default_factory=set)
    # Final gradients of the open bucket and its size, and buckets that are being summed.
    _bucket: list[str] = field(default_factory=list)
    _size: int = 0
    _num_buckets: int = 0
    _open: deque[tuple[Hashable, list[str]]] = field(default_factory=deque)
    _windows: dict[str, Window] = field(default_factory=dict)
    _parameter_bytes: dict[str, int] = field(init=False)
    bytes: dict[str, int] = field(init=False)
    _share_bytes: dict[str, int] = field(init=False)
    _in_shares: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """There are none."""
        around = self.around
        metas = parameters_of(around.program)
        trained = {name: meta for name, meta in metas.items() if meta.requires_grad}
        self._parameter_bytes = {name: meta.num_bytes for name, meta in trained.items()}
        self.bytes = around.sharing.gradient_bytes(trained)
        self._share_bytes = around.sharing.share_bytes(trained)
        self._in_shares = frozenset(around.in_shares())
        for action in around.schedule.actions[around.rank]:
            if action.kind in FINAL_KINDS:
                self._last[action.stage] = action.microbatch

    def are_new(self, names: Iterable[str]) -> bool:
        """Whether one of these has no gradient yet."""
        return any(name not in self._exist for name in names)

    def add(self, name: str, segment: SegmentProgram, action: Action) -> None:
        """A segment's backward has given a gradient."""
        shared = self.shared(name, action)
        if name in self._in_shares and (shared is None or shared.num_holders == 1):
            self._gets_final(name)
            return
        if shared is not None:
            self._add_shared(name, shared, segment, action)
            return
        self._now_exists(name)
        self.reduce(name, action)

    def shared(self, name: str, action: Action) -> SharedHere | None:
        """What a parameter is that several segments read; None for others."""
        pipe = self.around.schedule.microbatch_pipes[action.microbatch]
        return self.around.shared.get((name, pipe))

    def reduce(self, name: str, action: Action) -> None:
        """A final gradient goes into a bucket; a full one is summed over replicas."""
        around = self.around
        if around.bucket_bytes is None or action.kind not in FINAL_KINDS:
            return
        if not (self._is_last(action) or around.sharing.every_microbatch):
            return
        self._bucket.append(name)
        self._size += self._parameter_bytes[name]
        if self._size >= around.bucket_bytes:
            self.flush(around.schedule.label(action))

    def flush(self, at: str) -> None:
        """The open bucket takes the place of its gradients, which it is copied from."""
        names, self._bucket, self._size = self._bucket, [], 0
        if not names:
            return
        sharing = self.around.sharing
        if not sharing.is_sharded:
            if len(names) > 1:
                self.ledger.look(at, sum(self.bytes[name] for name in names))
            return
        if sharing.every_microbatch and len(self._open) >= MAX_OPEN_BUCKETS:
            self._take()
        share_bytes = sum(self._share_bytes[name] for name in names)
        sent_bytes = (sharing.degree + 1) * share_bytes
        self.ledger.look(at, sent_bytes)
        for name in names:
            if name in self._exist:  # else zeros are sent
                self._exist.remove(name)
                self.ledger.release(("gradient of", name))
        self._num_buckets += 1
        self.ledger.hold(("bucket", self._num_buckets), sent_bytes, Part.COMMUNICATION)
        self._open.append((("bucket", self._num_buckets), names))

    def finish(self) -> None:
        """All sums have come."""
        while self._open:
            self._take()
        for window in self._windows.values():
            window.close()

    def _take(self) -> None:
        """The oldest sum becomes this replica's share, or is added to it."""
        key, names = self._open.popleft()
        self.ledger.release(key)
        for name in names:
            if not self.ledger.has(("share of", name)):
                self.ledger.hold(("share of", name), self._share_bytes[name], Part.GRADIENTS)

    def _is_last(self, action: Action) -> bool:
        return action.microbatch == self._last[action.stage]

    def _now_exists(self, name: str) -> None:
        if name not in self._exist:
            self._exist.add(name)
            self.ledger.hold(("gradient of", name), self.bytes[name], Part.GRADIENTS)

    def _add_shared(
        self, name: str, shared: SharedHere, segment: SegmentProgram, action: Action
    ) -> None:
        """A share of a shared parameter's gradient, which waits for those of other segments."""
        every_microbatch = self.around.every_microbatch
        number = action.microbatch if every_microbatch else 0
        in_shares = name in self._in_shares
        key = ("share", name, number)
        num_bytes = self._share_bytes[name] if in_shares else self.bytes[name]
        if not self.ledger.has(key):
            self.ledger.hold(key, num_bytes, Part.COMMUNICATION, action.stage)
        is_last = self._is_last(action)
        if segment.segment.index != shared.first or not (every_microbatch or is_last):
            return
        if not shared.owned:
            sends = self._windows.setdefault(name, Window(self.ledger, shared.open_sends))
            sends.add([key])
            if is_last:  # the owner's sum comes at the end
                self._gets_final(name)
            return
        if in_shares:
            self._gets_final(name)
        else:
            self._now_exists(name)
        if shared.num_holders > 1 and not self.ledger.has(("ahead", name)):
            # The share of the next microbatch is posted ahead.
            self.ledger.hold(("ahead", name), num_bytes, Part.COMMUNICATION, action.stage)
        if shared.num_holders > 1:
            # For a moment there are the others' sum, the share of this rank, and both together.
            self.ledger.look(self.around.schedule.label(action), 2 * num_bytes, action.stage)
        self.ledger.release(key)
        if not in_shares:
            self.reduce(name, action)

    def _gets_final(self, name: str) -> None:
        """What another rank has summed, of which a sharded optimizer needs a share."""
        if not self.around.sharing.is_sharded:
            self._now_exists(name)
        elif not self.ledger.has(("share of", name)):
            self.ledger.hold(("share of", name), self._share_bytes[name], Part.GRADIENTS)
