"""Comparison of a run on ranks with the run of one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from merak.check.compare import (
    TOLERANCE,
    Disagreement,
    Distances,
    distances,
    loss_difference,
    output_distances,
    whole,
)
from merak.check.runs import Job, Outcome
from merak.check.source_place import SourcePlace, latest
from merak.graph.ir.ir import ModelGraph

KINDS = ("gradients", "parameters", "buffers")
"""The fields of an outcome that are compared, in the order in which they go wrong."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Differences between a run on ranks and the run of one process.

    Args:
        loss: the largest relative difference of a step's loss.
        gradient: of the first step's gradients, by the largest magnitude of each tensor.
        parameter: of the parameters after the steps, in the same way.
        buffer: of the buffers after the steps, in the same way.
        evaluation: of the outputs in evaluation, in the same way; None if nothing was evaluated.
        reason: what is more than rounding; None if nothing is.
    """

    loss: float
    gradient: float
    parameter: float
    buffer: float
    evaluation: float | None
    reason: str | None

    @property
    def most(self) -> float:
        """Largest of all differences."""
        return max(self.loss, self.gradient, self.parameter, self.buffer, self.evaluation or 0.0)


def judge(
    job: Job,
    graph: ModelGraph,
    ranks: Sequence[Outcome],
    expected: Outcome,
    tolerance: float = TOLERANCE,
) -> Comparison:
    """Compare losses, gradients, parameters, buffers and outputs of evaluations.

    Args:
        job: what was trained.
        graph: its segments.
        ranks: the outcome on every rank.
        expected: the outcome in one process.
        tolerance: the most that is taken for rounding in tensors; losses are float32 numbers.

    Raises:
        Disagreement: ranks that must hold equal tensors hold different ones.
    """
    if any(rank.losses != ranks[0].losses for rank in ranks):
        raise Disagreement("the ranks report different losses.")
    off = {kind: distances(whole(ranks, kind), getattr(expected, kind)) for kind in KINDS}
    loss = loss_difference(ranks[0].losses, expected.losses)
    wrong = {
        kind: [n for n, d in found.items() if not d <= tolerance] for kind, found in off.items()
    }
    gradient, parameter, buffer = (max(off.get(kind, {}).values(), default=0.0) for kind in KINDS)
    reason = _reason(graph, loss if not loss <= TOLERANCE else None, off, wrong)
    if not job.options.evaluate:
        return Comparison(loss, gradient, parameter, buffer, None, reason)
    outputs = output_distances(whole(ranks, "evaluations"), expected.evaluations)
    evaluation = max(outputs.values(), default=0.0)
    reason = reason or _evaluation_reason(outputs, tolerance)
    return Comparison(loss, gradient, parameter, buffer, evaluation, reason)


def _evaluation_reason(off: Distances, tolerance: float) -> str | None:
    wrong = [name for name, distance in off.items() if not distance <= tolerance]
    if not wrong:
        return None
    return (
        f"the output {wrong[0]} is off by {off[wrong[0]]:.1e} of its largest magnitude; "
        f"{len(wrong)} of {len(off)} outputs of evaluations differ."
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
    kind: str, place: SourcePlace, distance: float, wrong: int, compared: int, loss: float | None
) -> str:
    what = {"gradients": "the gradient", "parameters": "the value", "buffers": "the buffer"}[kind]
    when = "" if kind == "gradients" else "after the steps "
    losses = "" if loss is None else f"; the losses are off by {loss:.1e} too"
    return (
        f"{what} of {place.name} is off by {distance:.1e} of its largest magnitude, in "
        f"segment {place.segment} ({place.segment_name}) at {place.source or 'an unknown line'}; "
        f"{wrong} of {compared} {kind} {when}differ{losses}."
    )
