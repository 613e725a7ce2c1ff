"""The plan of a job compared with its first steps, and the layout that they show to be faster."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from merak.core.announce import announce
from merak.core.health.status import phase
from merak.core.rank0 import decide_on_rank0
from merak.engine.engine import Engine
from merak.engine.planning.choose import Job
from merak.graph.weights.laid_out import like
from merak.plan.expected.measured import (
    RankTimes,
    Slowness,
    measured_cluster,
    slowness_of,
)
from merak.plan.price.candidate import Candidate
from merak.plan.price.step import price, step_parts
from merak.plan.search.explain import describe
from merak.plan.search.pinned import Pinned
from merak.plan.search.plan_file import candidate_from
from merak.plan.search.search import search
from merak.record.idle import transfer_s
from merak.record.run import MeasuredStep

WORTH = 0.05
"""Part of a step that another layout must save."""

FIRST_STEPS = 5
"""Steps behind which a job is compared with its plan: the first is not among those recorded."""

logger = logging.getLogger(__name__)


def times_of(engine: Engine) -> RankTimes | None:
    """Times of this rank in the engine's recorded steps; a pipeline's ranks call it together.

    Returns:
        Their medians; None with fewer than two steps.
    """
    steps = engine.progress.records.own()
    found: dict[int, list[float]] = {}
    for own in engine.recorded_steps():
        if not all(own.records):
            continue
        step = MeasuredStep(own.step, own.schedule, own.records, own.spans)
        for boundary, seconds in transfer_s(step).items():
            found.setdefault(boundary, []).append(seconds)
    if len(steps) < 2:
        return None
    begins = [own.span[0] for own in steps]
    return RankTimes(
        step_s=median(after - before for before, after in pairwise(begins)),
        busy_s=median(own.busy_s for own in steps),
        reduction_s=median(own.span[1] - own.span[0] - own.pipeline_s for own in steps),
        update_s=median(own.update_s for own in steps),
        transfers_s={boundary: median(seconds) for boundary, seconds in found.items()},
    )


@dataclass(slots=True)
class Replanner:
    """Compares the plan of a job with its first steps, on rank 0 for all ranks.

    Args:
        job: as it was planned; `keep_model` keeps its model.
        pinned: choices that the search leaves as they are.
        plan: the layout in which the job runs.
        moves: whether the job goes on in a layout that is faster, or only says so.
        advice: what else to do about it, for people.
    """

    job: Job
    pinned: Pinned
    plan: Candidate
    moves: bool
    advice: str
    _tried: list[tuple[float, Candidate]] = field(init=False, default_factory=list)
    _problem: Exception | None = field(init=False, default=None)

    def keep_model(self) -> None:
        """Keep the model as it is for the search to trace it again, before an engine lays it out.

        Its parameters need no values.
        """
        if self.job.cluster is None:
            return  # on another rank than that which searches
        source = self.job.workload.source
        try:
            new: dict[int, Any] = {
                id(own): like(own, own.detach().to("meta")) for own in source.model.parameters()
            }
            source.model = copy.deepcopy(source.model, new)
        except Exception as error:  # of the model's own
            self._problem = error

    def faster(self, engine: Engine) -> Candidate | None:
        """A layout in which a step would take over 5 % less; all ranks call it together.

        A layout that the job has run in counts with the time that its steps took, so that each is
        left at most once.

        Args:
            engine: that has run some steps of the plan.

        Returns:
            The layout to go on in; None to stay.
        """
        times = engine.gather(times_of(engine), "the times of the first steps of")
        what = "whether another layout is faster"
        values = decide_on_rank0(engine.mesh, what, lambda: self._decide(times))
        return None if values is None else candidate_from(values)

    def _decide(self, times: Sequence[RankTimes | None]) -> dict[str, object] | None:
        ranks = [own for own in times if own is not None]
        if len(ranks) < len(times):
            return None
        try:
            if self._problem is not None:
                raise self._problem
            with phase("comparing the plan with the first steps"):
                found = self._search(ranks)
        except Exception as error:  # training is worth more than its comparison
            logger.warning("the first steps cannot be compared with the plan: %s", error)
            return None
        return None if found is None or not self.moves else found.values()

    def _search(self, ranks: Sequence[RankTimes]) -> Candidate | None:
        job, plan = self.job, self.plan
        assert job.cluster is not None
        parts = step_parts(job.workload, job.cluster, plan)
        slowness = slowness_of(job.cluster, plan, parts, ranks)
        cluster = measured_cluster(job.cluster, parts, slowness)
        now_s = median(own.step_s for own in ranks)
        priced_s = price(job.workload, job.cluster, plan).step_s
        # What no price has, such as loading data, any layout has.
        rest_s = max(0.0, now_s - price(job.workload, cluster, plan).step_s)
        tried = [own for _, own in self._tried] + [plan]
        top = len(tried) + 1
        ranking = search(job.workload, cluster, self.pinned, top=top, refusal=job.refusal)
        others = [(own.step_s + rest_s, own.candidate) for own in ranking.plans]
        others = [own for own in others if own[1] not in tried] + self._tried
        self._tried.append((now_s, plan))
        best_s, best = min(others, key=lambda own: own[0], default=(now_s, plan))
        announce(
            "plan: a step takes %.4g s, where %.4g s were priced (%s)",
            now_s,
            priced_s,
            in_words(slowness),
        )
        if best_s >= (1 - WORTH) * now_s:
            announce("plan: no other layout would be more than 5 % faster")
            return None
        announce(
            "plan: %s would take %.4g s, %.0f %% less; %s",
            with_partition(best),
            best_s,
            100 * (1 - best_s / now_s),
            "the job goes on in it behind its next checkpoint" if self.moves else self.advice,
        )
        return best


class PlanWatch:
    """Compares a job with its plan once it has run some steps in a layout.

    Args:
        replanner: compares them.
    """

    def __init__(self, replanner: Replanner) -> None:
        self._replanner: Replanner | None = replanner
        self._num_steps, self._step = 0, 0
        self.compression = replanner.job.workload.common.gradient_compression
        """Of gradients, as it was chosen for the plan."""
        self.layout: Candidate | None = None
        """The layout to go on in behind the next checkpoint; None to stay."""
        replanner.keep_model()

    def start(self, step: int) -> None:
        """Begin with a layout behind so many steps of the training."""
        self._num_steps, self._step, self.layout = 0, step, None

    def compare(self, engine: Engine, step: int) -> None:
        """Compare the steps with the plan if enough have run; all ranks call it together.

        Args:
            engine: that has run them.
            step: of the training, which has ended.
        """
        self._num_steps += step != self._step
        self._step = step
        if self._replanner is None or self._num_steps < FIRST_STEPS or self.layout is not None:
            return
        self.layout = self._replanner.faster(engine)
        if self.layout is None:
            self._replanner = None  # with the graphs of the plan
        else:
            self._replanner.plan = self.layout


def with_partition(layout: Candidate) -> str:
    """A layout in words, with the segments of its stages where there are several."""
    stages = layout.partition
    parts = "" if stages is None or len(stages) == 1 else f", partition={list(stages)}"
    return f"{describe(layout)}{parts}"


def in_words(slowness: Slowness) -> str:
    """What was measured ÷ what was priced, for people.

    Args:
        slowness: of a job.
    """
    slow, fast = (own(slowness.computation) for own in (max, min))
    span = f"{fast:.3g} times" if slow < (1 + WORTH) * fast else f"{fast:.3g} to {slow:.3g} times"
    found = [f"segments took {span} as long"]
    if slow >= (1 + WORTH) * fast:
        found[0] += f", longest on rank {slowness.computation.index(slow)}"
    for name, ratios in (("transfers", slowness.transfers), ("reductions", slowness.reductions)):
        for network, ratio in sorted(ratios.items()):
            found.append(f"{name} {'between' if network else 'inside'} hosts {ratio:.3g} times")
    return ", ".join([*found, f"updates {max(slowness.updates):.3g} times"])
