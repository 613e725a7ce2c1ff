"""Judge a run on ranks by the run of one process, and find where they part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from merak.check.compare import (
    TOLERANCE,
    Disagreement,
    Distances,
    distances,
    loss_difference,
    whole,
)
from merak.check.place import Place, latest
from merak.check.training import Job, Outcome, train_alone
from merak.graph.ir import ModelGraph

MOST_ROUNDING = 1e-3
"""However badly a model is conditioned, more than this is not taken for rounding."""

ROUNDING_FACTOR = 4.0
"""Two roundings of the same sums may be so many times as far apart as one is from the truth."""

KINDS = ("gradients", "parameters", "buffers")
"""The fields of an outcome that are compared, in the order in which they go wrong."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How far a run on ranks is from the run of one process.

    Args:
        loss: the largest relative difference of a step's loss.
        gradient: of the first step's gradients, by the largest magnitude of each tensor.
        parameter: of the parameters after the steps, likewise.
        tolerance: the most that was taken for rounding.
        reason: what is wrong; None if nothing is.
    """

    loss: float
    gradient: float
    parameter: float
    tolerance: float
    reason: str | None


@dataclass(frozen=True, slots=True)
class _Allowed:
    """What is taken for rounding: for the losses, and by kind for tensors that need more.

    Args:
        loss: the most that a loss may be off.
        tensors: the most that tensors may be off, by kind and name.
        own: how far gradients in float32 are from those in float64, at the most; 0 if unknown.
    """

    loss: float
    tensors: Mapping[str, Distances]
    own: float = 0.0

    def of(self, kind: str, name: str) -> float:
        """The most that one tensor may be off."""
        return self.tensors.get(kind, {}).get(name, TOLERANCE)

    def most(self) -> float:
        """The most that anything may be off."""
        return max(self.loss, *chain([TOLERANCE], *(d.values() for d in self.tensors.values())))


def judge(job: Job, graph: ModelGraph, ranks: Sequence[Outcome], expected: Outcome) -> Verdict:
    """Compare losses, gradients, parameters and buffers.

    Args:
        job: what was trained.
        graph: its segments.
        ranks: what every rank saw.
        expected: what one process saw.

    Raises:
        Disagreement: ranks that must hold the same hold different things.
    """
    if any(rank.losses != ranks[0].losses for rank in ranks):
        raise Disagreement("the ranks report different losses.")
    # Replicas keep running statistics of their own batches, as in torch's own data parallelism.
    kinds = KINDS if job.layout.dp == 1 else KINDS[:2]
    off = {kind: distances(whole(ranks, kind), getattr(expected, kind)) for kind in kinds}
    loss = loss_difference(ranks[0].losses, expected.losses)
    allowed = _Allowed(TOLERANCE, {})
    if _exceeds([loss, *chain(*(d.values() for d in off.values()))]):
        allowed = _own_rounding(job, expected, kinds)
    wrong = {
        kind: [n for n, d in off[kind].items() if not d <= allowed.of(kind, n)] for kind in kinds
    }
    return Verdict(
        loss=loss,
        gradient=max(off["gradients"].values(), default=0.0),
        parameter=max(off["parameters"].values(), default=0.0),
        tolerance=allowed.most(),
        reason=_chaos(allowed, wrong)
        or _reason(graph, loss if not loss <= allowed.loss else None, off, wrong),
    )


def _exceeds(found: Iterable[float]) -> bool:
    return any(not value <= TOLERANCE for value in found)


def _own_rounding(job: Job, expected: Outcome, kinds: Sequence[str]) -> _Allowed:
    """How far float32 is from float64 in one process: more than that cannot be asked of ranks."""
    try:
        exact = train_alone(job, torch.float64)
    except Exception:  # a model that fixes its own types: then there is no excuse
        return _Allowed(TOLERANCE, {})
    own = {k: distances(getattr(expected, k), getattr(exact, k)) for k in kinds}
    return _Allowed(
        _limit(loss_difference(expected.losses, exact.losses)),
        {kind: {name: _limit(d) for name, d in found.items()} for kind, found in own.items()},
        max(own["gradients"].values(), default=0.0),
    )


def _limit(rounding: float) -> float:
    return max(TOLERANCE, min(MOST_ROUNDING, ROUNDING_FACTOR * rounding))


def _chaos(allowed: _Allowed, wrong: Mapping[str, Sequence[str]]) -> str | None:
    """What to say where one process in float32 is as far from the truth as the ranks from it."""
    later = wrong["parameters"] or wrong.get("buffers")
    if allowed.own < MOST_ROUNDING or wrong["gradients"] or not later:
        return None
    return (
        "the first step's gradients are right, but nothing can be said of later steps: in float32 "
        f"this model's own gradients are off by {allowed.own:.1e} from those in float64, as of a "
        "batch norm over very few numbers; try a larger --batch."
    )


def _reason(
    graph: ModelGraph,
    loss: float | None,
    off: Mapping[str, Distances],
    wrong: Mapping[str, Sequence[str]],
) -> str | None:
    for kind, names in wrong.items():
        if names:
            place = latest(graph, names) if kind == "gradients" else latest(graph, names[:1])
            return _sentence(kind, place, off[kind][place.name], len(names), len(off[kind]), loss)
    if loss is not None:
        return f"the loss is off by {loss:.1e} though every gradient is right."
    return None


def _sentence(
    kind: str, place: Place, distance: float, wrong: int, compared: int, loss: float | None
) -> str:
    what = {"gradients": "the gradient", "parameters": "the value", "buffers": "the buffer"}[kind]
    when = "" if kind == "gradients" else "after the steps "
    losses = "" if loss is None else f"; the losses are off by {loss:.1e} too"
    return (
        f"{what} of {place.name} is off by {distance:.1e} of its largest magnitude, in "
        f"segment {place.segment} ({place.segment_name}) at {place.source or 'an unknown line'}; "
        f"{wrong} of {compared} {kind} {when}differ{losses}."
    )
