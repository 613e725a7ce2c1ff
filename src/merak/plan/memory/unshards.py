"""Unshards: the segments whose parameters ZeRO-3 gathers for an action, and the memory of it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace

from merak.graph.program.program import SegmentProgram, StageProgram
from merak.plan.memory.communication_limits import level_bytes
from merak.plan.memory.context import MemoryContext
from merak.plan.memory.ledger import Category, Ledger
from merak.schedule.ir import BACKWARD_KINDS, FINAL_KINDS, Action, Kind


@dataclass(frozen=True, slots=True)
class SegmentUnshard:
    """What an action does with the parameters of a segment.

    Args:
        segment: whose parameters they are.
        kind: of the action.
    """

    segment: SegmentProgram
    kind: Kind

    @property
    def gathers(self) -> bool:
        """Whether they are gathered: gradients that are left for later read none."""
        return self.kind is not Kind.WEIGHT_GRADIENT

    def reduces(self, is_tied: bool) -> bool:
        """Whether gradients are reduced when it ends.

        Args:
            is_tied: of parameters that several segments read: their sums go on to other ranks at
                once, and nothing of them is left for later.
        """
        if self.kind in FINAL_KINDS:
            return self.gathers or not is_tied
        return self.kind is Kind.INPUT_GRADIENT and is_tied


def unshards_of(kind: Kind, program: StageProgram, recomputes: bool) -> list[SegmentUnshard]:
    """The unshards of an action, in order.

    Args:
        kind: of the action.
        program: of its stage, for its microbatch.
        recomputes: whether the stage recomputes the activations that its program does not save.
    """
    segments = reversed(program.segments) if kind in BACKWARD_KINDS else program.segments
    return [
        SegmentUnshard(segment, kind)
        for segment in segments
        if needs_parameters(segment, kind, recomputes)
    ]


def needs_parameters(segment: SegmentProgram, kind: Kind, recomputes: bool) -> bool:
    """Whether an action needs the parameters of a segment, or leaves gradients of them.

    Arguments are those of `unshards_of`.
    """
    if kind is Kind.RECOMPUTE:
        return segment.trains and recomputes and not segment.saved
    return segment.trains or kind is Kind.FORWARD


class UnshardMemory:
    """What a rank holds of gathered parameters, and of gradients that are being reduced.

    As the engine does: the next unshard's parameters arrive in a buffer beside this one, from which
    they are copied when it begins, and a reduction is open while the next backward computes.

    Args:
        ctx: of the rank's timeline.
        ledger: where it is held.
    """

    def __init__(self, ctx: MemoryContext, ledger: Ledger) -> None:
        self._ledger = ledger
        sharded = ctx.sharded_parameters()
        self._whole = {name: meta.num_bytes for name, meta in sharded.items()}
        low = replace(ctx.zero, master_weights=False).optimizer_tensors(sharded)
        steps = ctx.zero.optimizer_tensors(sharded)
        # In the buffer of a gather: all rows, and this replica's own where they are cast for it.
        self._arriving = {
            n: low[n].num_bytes
            * (ctx.zero.degree_of(n) + (meta.requires_grad and steps[n].dtype != meta.dtype))
            for n, meta in sharded.items()
        }
        self._gradients = ctx.zero.gradient_bytes(sharded)
        self._shards = ctx.zero.gradient_shard_bytes(sharded)
        self._degrees = {name: ctx.zero.degree_of(name) for name in sharded}
        self._trained = {name for name, meta in sharded.items() if meta.requires_grad}
        schedule = ctx.schedule
        self._tied = {name for name, _ in ctx.tied}
        self._order = [
            found
            for action in (schedule.actions[ctx.rank] if sharded else ())
            for unshard in unshards_of(
                action.kind, ctx.program.stages[action.stage], schedule.recompute[action.stage]
            )
            if unshard.gathers and (found := self._names(unshard.segment))
        ]
        self._next = 0
        self._reduced: set[str] = set()
        if ctx.has_levels and sharded:
            # One exchange at a time copies a tensor, and shards of it.
            largest = max(sum(self._arriving[n] for n in names) for names in self._order)
            levels = level_bytes(largest, is_sharded=True)
            ledger.hold("levels of gathers", levels, Category.COMMUNICATION)

    def _names(self, segment: SegmentProgram) -> tuple[str, ...]:
        if not self._whole:
            return ()
        names = dict.fromkeys(segment.segment.parameters)
        return tuple(name for name in names if name in self._whole)

    def begin(self, segment: SegmentProgram, action: Action) -> None:
        """Hold the parameters of the next unshard, and what arrives for the one after."""
        names = self._names(segment)
        if not names:
            return
        number = self._next
        self._next += 1
        self._arrive(names if not number else ())
        for name in names:
            if not self._ledger.has(("gathered", name)):
                self._hold(("gathered", name), self._whole[name])
        self._ledger.record_peak(action)
        for name in names:
            if self._ledger.has(("arriving", name)):
                self._ledger.release(("arriving", name))
        following = self._order[number + 1] if number + 1 < len(self._order) else ()
        self._arrive(tuple(name for name in following if name not in names))

    def _arrive(self, names: tuple[str, ...]) -> None:
        for name in names:
            self._hold(("arriving", name), self._arriving[name])

    def end(self, segment: SegmentProgram, action: Action) -> None:
        """Release the parameters of an unshard, and hold the gradients that it reduces.

        Args:
            segment: whose parameters they are.
            action: which it is part of.
        """
        names = self._names(segment)
        if not names:
            return
        self.reduce(segment, action)
        following = self._order[self._next] if self._next < len(self._order) else ()
        for name in names:
            if name not in following:
                self._ledger.release(("gathered", name))

    def reduced_later(self, segment: SegmentProgram, action: Action) -> list[str]:
        """Parameters whose gradients a backward does not reduce, but what it leaves for later."""
        if action.kind is Kind.BACKWARD:
            return []
        return [n for n in self._names(segment) if n in self._trained and n not in self._tied]

    def are_new(self, names: Iterable[str]) -> bool:
        """Whether one of these has no whole gradient yet."""
        return not all(self._ledger.has(("left", name)) for name in names)

    def leave(self, names: Iterable[str]) -> None:
        """Hold whole gradients until they are reduced."""
        for name in names:
            if not self._ledger.has(("left", name)):
                self._ledger.hold(("left", name), self._whole[name], Category.GRADIENTS)

    def reduce(self, segment: SegmentProgram, action: Action) -> None:
        """Hold the gradients that an unshard reduces at its end; arguments as of `end`."""
        unshard = SegmentUnshard(segment, action.kind)
        trained = [name for name in self._names(segment) if name in self._trained]
        names = [name for name in trained if unshard.reduces(name in self._tied)]
        if not names:
            return
        if self._ledger.has("reduction"):
            self._ledger.release("reduction")
        packed = sum(self._degrees[n] * self._shards[n] for n in names)
        # The first shard of a gradient stays: it is among the gradients.
        received = sum(self._shards[n] for n in names if n in self._reduced)
        self._reduced.update(names)
        left = [name for name in names if self._ledger.has(("left", name))]
        whole = sum(self._whole[name] for name in names if name not in left)
        self._ledger.record_peak(action, whole + packed + received)
        self._ledger.release_all(("left", name) for name in left)
        self._hold("reduction", packed + received)

    def _hold(self, key: Hashable, num_bytes: int) -> None:
        self._ledger.hold(key, num_bytes, Category.COMMUNICATION)

    def finish(self) -> None:
        """Release what the last reduction holds."""
        if self._ledger.has("reduction"):
            self._ledger.release("reduction")
