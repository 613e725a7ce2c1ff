"""The schedule IR: pipeline schedules as frozen data.

A schedule is, for every rank, the ordered list of its actions. Transfers, gradient reductions and
optimizer steps are not part of it: `merak.schedule.lower` derives them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from merak.core.errors import ScheduleError

USUAL = "1f1b"
"""Name of the schedule of a job that names none."""


class Kind(Enum):
    """Kind of computation of an action, on one stage and one microbatch."""

    FORWARD = "F"
    RECOMPUTE = "R"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"

    # Members are single objects; Enum's own hash is slow enough to show with a million actions.
    __hash__ = object.__hash__


GRADIENT_KINDS = frozenset({Kind.BACKWARD, Kind.INPUT_GRADIENT})
"""Kinds that yield the gradient of a stage's input."""

_ENDS = GRADIENT_KINDS | {Kind.FORWARD}

FINAL_KINDS = frozenset({Kind.BACKWARD, Kind.WEIGHT_GRADIENT})
"""Kinds that yield the gradient of a stage's weights, and so release its activations."""

BACKWARD_KINDS = GRADIENT_KINDS | FINAL_KINDS
"""Kinds that go through a stage's segments from the last to the first."""

_ACTION_TEXT = re.compile(r"(?:(\d+))?([FRBIW])(\d+)")


@dataclass(frozen=True, slots=True)
class Action:
    """One step of a rank's list; prints as `1F0`: forward of microbatch 0 on stage 1."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @property
    def short(self) -> str:
        """The text without the stage (`F0`), for ranks that hold one stage only."""
        return f"{self.kind.value}{self.microbatch}"


def parse_action(text: str, only_stage: int | None = None) -> Action:
    """Parse the text of an action.

    Args:
        text: such as `1F0`, or `F0` where `only_stage` is given.
        only_stage: the stage that a text without a stage means.

    Raises:
        ScheduleError: the text is no action, or names no stage where one is needed.
    """
    match = _ACTION_TEXT.fullmatch(text)
    if match is None:
        raise ScheduleError(
            f"{text!r} is not an action; write a kind of F, R, B, I or W between an optional "
            f"stage and a microbatch, such as F0 or 1F0."
        )
    stage, kind, microbatch = match.groups()
    if stage is None and only_stage is None:
        raise ScheduleError(
            f"{text!r} names no stage, and its rank holds several; write the stage first, as in "
            f"1{text}."
        )
    number = int(stage) if stage is not None else only_stage
    assert number is not None
    return Action(Kind(kind), number, int(microbatch))


@dataclass(frozen=True, slots=True)
class Schedule:
    """Lists of actions of every rank of a pipeline, for an iteration or an asynchronous run.

    A pipe is one complete copy of the model laid over the ranks. Most schedules have one; Chimera
    and GEMS have several, so that a stage lives on several ranks and a microbatch passes through
    exactly one of them.
    """

    name: str
    # pipes[pipe][stage] is the rank that holds the stage for the pipe's microbatches.
    pipes: tuple[tuple[int, ...], ...]
    # microbatch_pipes[microbatch] is the pipe that the microbatch passes through.
    microbatch_pipes: tuple[int, ...]
    # actions[rank] in the order in which the rank performs them.
    actions: tuple[tuple[Action, ...], ...]
    # recompute[stage]: the forward saves the stage's input only. Its activations are recomputed by
    # the microbatch's own R or, without one, inside its B or I.
    recompute: tuple[bool, ...]
    # eager_reduction[stage]: gradients are reduced as soon as they are complete on the rank, rather
    # than after the rank's last action.
    eager_reduction: tuple[bool, ...]
    # The optimizer steps once per this many consecutive microbatches. Synchronous schedules: all.
    microbatches_per_update: int
    # weight_versions[stage][microbatch]: how many updates had been applied to the weights that the
    # microbatch's actions use. Empty in synchronous schedules, where it is 0 throughout.
    weight_versions: tuple[tuple[int, ...], ...] = ()
    # Changes that the builder had to make to a request, in sentences for the user.
    notes: tuple[str, ...] = ()

    @property
    def num_stages(self) -> int:
        """Stages of the whole model."""
        return len(self.recompute)

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.actions)

    @property
    def num_microbatches(self) -> int:
        """Microbatches of the iteration."""
        return len(self.microbatch_pipes)

    @property
    def num_updates(self) -> int:
        """Optimizer steps of the iteration; 1 where it is synchronous."""
        return -(-self.num_microbatches // self.microbatches_per_update)

    @property
    def is_synchronous(self) -> bool:
        """Whether every action uses the weights of the iteration's start."""
        return not self.weight_versions

    @property
    def num_copies(self) -> int:
        """Copies of the model on the ranks, one for each pipe."""
        return len(self.pipes)

    @property
    def splits_backwards(self) -> bool:
        """Whether weight gradients have actions of their own."""
        return any(a.kind is Kind.WEIGHT_GRADIENT for own in self.actions for a in own)

    @property
    def holds_one_at_end(self) -> bool:
        """Whether the last stage runs a microbatch's backward before the next one's forward."""
        for own in self.actions:
            kinds = [a.kind for a in own if a.stage == self.num_stages - 1]
            ends = [kind in GRADIENT_KINDS for kind in kinds if kind in _ENDS]
            if any(one == other for one, other in pairwise(ends)):
                return False
        return True

    @property
    def has_backwards(self) -> bool:
        """Whether gradients are computed; an evaluation runs forwards alone."""
        return any(action.kind in FINAL_KINDS for own in self.actions for action in own)

    def rank_of(self, stage: int, microbatch: int) -> int:
        """The rank that performs the actions of a microbatch on a stage."""
        return self.pipes[self.microbatch_pipes[microbatch]][stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages whose weights a rank holds, ascending."""
        held = {s for pipe in self.pipes for s, own in enumerate(pipe) if own == rank}
        return tuple(sorted(held))

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        """The ranks that hold a stage's weights, ascending: its replicas."""
        return tuple(sorted({pipe[stage] for pipe in self.pipes}))

    def weight_version(self, stage: int, microbatch: int) -> int:
        """Weight version of a microbatch on a stage: the number of updates applied before."""
        return self.weight_versions[stage][microbatch] if self.weight_versions else 0

    def update_of(self, microbatch: int) -> int:
        """The optimizer step that takes a microbatch's gradients, from 0."""
        return microbatch // self.microbatches_per_update

    def label(self, action: Action) -> str:
        """An action's text: with its stage unless every rank holds one stage only."""
        return str(action) if self.has_several_stages_per_rank else action.short

    def labels(self, rank: int) -> list[str]:
        """The texts of a rank's actions, in order."""
        several = self.has_several_stages_per_rank
        return [str(a) if several else a.short for a in self.actions[rank]]

    @property
    def has_several_stages_per_rank(self) -> bool:
        """Whether some rank holds more than one stage."""
        return (
            len({(rank, s) for pipe in self.pipes for s, rank in enumerate(pipe)}) > self.num_ranks
        )
