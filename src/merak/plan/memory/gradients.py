"""Gradients of parameters in the memory timeline."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from merak.graph.program.program import SegmentProgram
from merak.plan.memory.communication_limits import MAX_OPEN_BUCKETS, level_bytes
from merak.plan.memory.context import MemoryContext, TiedParameter, parameters_of
from merak.plan.memory.ledger import Category, Ledger, SendWindow
from merak.schedule.ir import FINAL_KINDS, Action


@dataclass(slots=True)
class Gradients:
    """Bytes of a rank's gradients: their accumulation, and their buckets while they are reduced.

    Args:
        ctx: the context of the timeline.
        ledger: of the rank.
    """

    ctx: MemoryContext
    ledger: Ledger
    _last: dict[int, int] = field(default_factory=dict)
    _exist: set[str] = field(default_factory=set)
    # Final gradients of the open bucket and its size, and buckets that are being reduced.
    _bucket: list[str] = field(default_factory=list)
    _size: int = 0
    _num_buckets: int = 0
    _largest: int = 0
    _open: deque[tuple[Hashable, list[str]]] = field(default_factory=deque)
    _windows: dict[tuple[str, int], SendWindow] = field(default_factory=dict)
    _parameter_bytes: dict[str, int] = field(init=False)
    bytes: dict[str, int] = field(init=False)
    _shard_bytes: dict[str, int] = field(init=False)
    _sharded: frozenset[str] = frozenset()
    _tied_names: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Begin without any gradient."""
        ctx = self.ctx
        metas = parameters_of(ctx.program)
        trained = {name: meta for name, meta in metas.items() if meta.requires_grad}
        self._parameter_bytes = {name: meta.num_bytes for name, meta in trained.items()}
        self.bytes = ctx.zero.gradient_bytes(trained)
        self._shard_bytes = ctx.zero.gradient_shard_bytes(trained)
        self._sharded = frozenset(ctx.sharded_parameters())
        self._tied_names = frozenset(name for name, _ in ctx.tied)
        for action in ctx.schedule.actions[ctx.rank]:
            if action.kind in FINAL_KINDS:
                self._last[action.stage] = action.microbatch

    def are_new(self, names: Iterable[str]) -> bool:
        """Whether one of these has no gradient yet."""
        return any(name not in self._exist for name in names)

    def adds_in_place(self, names: Iterable[str], action: Action) -> bool:
        """Whether a backward only accumulates into gradients that all exist already.

        Args:
            names: of the gradients, each of which exists.
            action: the backward.
        """
        if self._sharded or self._reduces(action):
            return False
        return self._tied_names.isdisjoint(names)

    def add(self, name: str, segment: SegmentProgram, action: Action) -> None:
        """Add the gradient that a segment's backward has computed."""
        tied = self.tied(name, action)
        if name in self._sharded and (tied is None or tied.num_holders == 1):
            self._hold_final(name)
            return
        if tied is not None:
            self._add_tied(name, tied, segment, action)
            return
        self._hold_whole(name)
        self.reduce(name, action)

    def tied(self, name: str, action: Action) -> TiedParameter | None:
        """The tied parameter of this name in the action's pipe; None for others."""
        pipe = self.ctx.schedule.microbatch_pipes[action.microbatch]
        return self.ctx.tied.get((name, pipe))

    def reduce(self, name: str, action: Action) -> None:
        """Put a final gradient into the open bucket, and reduce the bucket when it is full."""
        ctx = self.ctx
        if ctx.bucket_bytes is None or not self._reduces(action):
            return
        if name in ctx.zero.experts and ctx.zero.expert_replicas == 1:
            return  # no other replica has these experts
        self._bucket.append(name)
        self._size += self._parameter_bytes[name]
        if self._size >= ctx.bucket_bytes:
            self.flush(action)

    def flush(self, at: str | Action) -> None:
        """Reduce the open bucket, which replaces the gradients that are copied into it."""
        names, self._bucket, self._size = self._bucket, [], 0
        if not names:
            return
        zero = self.ctx.zero
        if self.ctx.has_levels:
            self._hold_levels(sum(self.bytes[name] for name in names), zero.is_sharded)
        if not zero.is_sharded:
            if len(names) > 1 or self.ctx.has_levels:
                self.ledger.record_peak(at, sum(self.bytes[name] for name in names))
            return
        if zero.gradients and len(self._open) >= MAX_OPEN_BUCKETS:
            self._take()
        sent_bytes = sum((zero.degree_of(n) + 1) * self._shard_bytes[n] for n in names)
        self.ledger.record_peak(at, sent_bytes)
        for name in names:
            if name in self._exist:  # else zeros are sent
                self._exist.remove(name)
                self.ledger.release(("gradient of", name))
        self._num_buckets += 1
        self.ledger.hold(("bucket", self._num_buckets), sent_bytes, Category.COMMUNICATION)
        self._open.append((("bucket", self._num_buckets), names))

    def _hold_levels(self, num_bytes: int, is_sharded: bool) -> None:
        """Hold what the largest reduction by hierarchy so far has beside its bucket."""
        if num_bytes > self._largest:
            if self._largest:
                self.ledger.release("levels")
            self._largest = num_bytes
            held = level_bytes(num_bytes, is_sharded=is_sharded)
            self.ledger.hold("levels", held, Category.COMMUNICATION)

    def finish(self) -> None:
        """Wait for all reductions."""
        if self._largest:
            self.ledger.release("levels")
            self._largest = 0
        while self._open:
            self._take()
        for window in self._windows.values():
            window.close()

    def _take(self) -> None:
        """Wait for the oldest reduction, which becomes this replica's shard or is added to it."""
        key, names = self._open.popleft()
        self.ledger.release(key)
        for name in names:
            if not self.ledger.has(("shard of", name)):
                self.ledger.hold(("shard of", name), self._shard_bytes[name], Category.GRADIENTS)

    def _reduces(self, action: Action) -> bool:
        """Whether gradients are final with an action, and are reduced then."""
        is_final = action.kind in FINAL_KINDS and self.ctx.bucket_bytes is not None
        return is_final and (self._is_last(action) or self.ctx.zero.gradients)

    def _is_last(self, action: Action) -> bool:
        return action.microbatch == self._last[action.stage]

    def _hold_whole(self, name: str) -> None:
        if name not in self._exist:
            self._exist.add(name)
            self.ledger.hold(("gradient of", name), self.bytes[name], Category.GRADIENTS)

    def _add_tied(
        self, name: str, tied: TiedParameter, segment: SegmentProgram, action: Action
    ) -> None:
        """Add one segment's term of a tied gradient, which waits for those of other segments."""
        every_microbatch = self.ctx.every_microbatch
        pipe = self.ctx.schedule.microbatch_pipes[action.microbatch]  # each has a chain of its own
        number = action.microbatch if every_microbatch else 0
        is_sharded = name in self._sharded
        key = ("term", name, pipe, number)
        num_bytes = self._shard_bytes[name] if is_sharded else self.bytes[name]
        if not self.ledger.has(key):
            self.ledger.hold(key, num_bytes, Category.COMMUNICATION, action.stage)
        is_last = self._is_last(action)
        if segment.segment.index != tied.first or not (every_microbatch or is_last):
            return
        if not tied.owned:
            window = SendWindow(self.ledger, tied.open_sends)
            self._windows.setdefault((name, pipe), window).add([key])
            if is_last:  # the owner's sum arrives at the end
                self._hold_final(name)
            return
        if is_sharded:
            self._hold_final(name)
        else:
            self._hold_whole(name)
        ahead = ("ahead", name, pipe)
        if tied.num_holders > 1 and not self.ledger.has(ahead):
            # The receive for the next microbatch is posted ahead.
            self.ledger.hold(ahead, num_bytes, Category.COMMUNICATION, action.stage)
        if tied.num_holders > 1:
            # For a moment there are the others' sum, this rank's term, and the sum of both.
            self.ledger.record_peak(action, 2 * num_bytes, action.stage)
        self.ledger.release(key)
        if not is_sharded:
            self.reduce(name, action)

    def _hold_final(self, name: str) -> None:
        """Hold a final gradient that was summed elsewhere: all of it, or this replica's shard."""
        if not self.ctx.zero.is_sharded:
            self._hold_whole(name)
        elif not self.ledger.has(("shard of", name)):
            self.ledger.hold(("shard of", name), self._shard_bytes[name], Category.GRADIENTS)
