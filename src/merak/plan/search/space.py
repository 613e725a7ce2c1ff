"""The space of a search: every way to lay a job out that the rules allow.

The rules, each of which is printed where it leaves something out:

- All devices are used, and dp · cp · tp · pp is their number, unless dp, tp and pp are pinned.
- tp divides what the model's graph can shard, and stays inside a node.
- dp divides the global batch, and dp · microbatch too; microbatches have 1, 2, 4 … samples.
- A pipeline has a stage per pp rank at least, each with a segment at least.
- Schedules are synchronous: others train with weights of several versions. Pin one to have it.
- Sequence parallelism and sub-pipelining need tp > 1, sub-pipelining also two samples or more.
- ZeRO needs dp > 1; what excludes each other beside it is in `merak.plan.constraints`.
- Offloading is searched where it is pinned.
- Context parallelism is searched where nothing fits without it, and where the best plan waits and
  is faster with it; it has no sequence parallelism where tp > 1, and no sub-pipelining.
- Where tp is 1, as many replicas may have a layer's experts between them as divide both; with
  tp > 1, all its ranks or none.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from merak.core.elastic import GivenDegrees, divisors
from merak.core.errors import ScheduleError
from merak.core.units import counted
from merak.plan.constraints import Reductions, low_sums_problem, problem_of
from merak.plan.options import LAYOUT, ParallelOptions, searched_values
from merak.plan.price.candidate import Candidate
from merak.plan.search.degrees import check_degrees
from merak.plan.search.pinned import Pinned
from merak.plan.search.ranking import Rejected
from merak.schedule import registry
from merak.schedule.traits import Traits

MOST_MICROBATCH = 8
"""Largest microbatch that is searched; twice as many are tried where it is the best plan's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Degrees, batch and model facts that the search space of a job depends on.

    Args:
        num_devices: of the cluster.
        devices_per_node: of the node with the most.
        global_batch: samples of one step of the whole job.
        num_segments: of the model.
        few_segments: why it is cut into no more; "" where nothing but its size says so.
        problem: why a tp, cp and ep do not fit the model; None where they do.
        cps: context parallel degrees that are searched.
        experts: of every layer, that ranks can have between them; 0 for none.
        most_microbatch: the largest that is searched.
        common: options that no layout changes.
        low_sums: whether gradients are reduced in another type than ZeRO 3 can.
        drops_layers: whether a step may leave parameters without a gradient, which ZeRO 3 cannot.
    """

    num_devices: int
    devices_per_node: int
    global_batch: int
    num_segments: int
    problem: Callable[[int, int, int], str | None]
    cps: tuple[int, ...] = (1,)
    experts: int = 0
    most_microbatch: int = MOST_MICROBATCH
    common: ParallelOptions = field(default_factory=ParallelOptions)
    low_sums: bool = False
    drops_layers: bool = False
    few_segments: str = ""

    @property
    def segments(self) -> str:
        """The number of the model's segments in words, with the reason for so few."""
        why = f": {self.few_segments}" if self.few_segments else ""
        return f"{counted(self.num_segments, 'segment')}{why}"


@dataclass(slots=True)
class Space:
    """Candidates of a job, and the regions that the rules leave out.

    Args:
        candidates: in no order that matters.
        rejected: regions, with the rule.
        refusal: why the first of the layouts cannot have the pinned schedule; None for none.
    """

    candidates: list[Candidate] = field(default_factory=list)
    rejected: dict[str, Rejected] = field(default_factory=dict)
    refusal: str | None = None

    def reject(self, what: str, why: str) -> None:
        """Record that a region is left out; of several pp from which on, only the smallest."""
        self.rejected.setdefault(what.partition("≥")[0] + why[-12:], Rejected(what, why))


def space_of(job: Job, pinned: Pinned) -> Space:
    """List the candidates of a job.

    Args:
        job: the devices, the batch and the model.
        pinned: choices that are made.

    Raises:
        PlanError: what is pinned contradicts the devices or the batch.
    """
    check_degrees(job.num_devices, job.global_batch, pinned)
    space = Space()
    given = {name: pinned.choices[name] for name in LAYOUT if name in pinned.choices}
    for tp, cp in _within_stages(job, pinned, space):
        for pp, dp in _pipelines(job, pinned, tp * cp, space):
            for ep, microbatch in itertools.product(
                _expert_degrees(job, pinned, tp, cp, dp * cp, space),
                list(_microbatches(job, pinned, dp, space)),
            ):
                whole = job.global_batch // dp // microbatch
                base = Candidate(
                    **given,
                    **GivenDegrees(dp, tp, pp, cp, ep)._asdict(),
                    microbatch=microbatch,
                    num_microbatches=whole,
                )
                space.candidates += _variants(job, pinned, base, space)
    return space


def searched_tp(job: Job, pinned: Pinned) -> list[int]:
    """Tensor parallel degrees that are searched: the pinned one, or all that a node can hold.

    A pinned ep above 1 leaves two: its own, whose ranks have the experts, and 1.

    Args:
        job: the devices.
        pinned: choices that are made.
    """
    if pinned.tp is not None:
        return [pinned.tp]
    degrees = [tp for tp in divisors(job.num_devices) if tp <= job.devices_per_node]
    return degrees if pinned.ep in (None, 1) else [tp for tp in degrees if tp in (1, pinned.ep)]


def _within_stages(job: Job, pinned: Pinned, space: Space) -> Iterator[tuple[int, int]]:
    """The tp and cp that fit the model."""
    cps = job.cps if pinned.cp is None else (pinned.cp,)
    for tp, cp in itertools.product(searched_tp(job, pinned), cps):
        if pinned.tp is None and cp > 1 and job.num_devices % (tp * cp):
            continue
        problem = job.problem(tp, cp, pinned.ep or 1)
        if problem is None:
            yield tp, cp
        elif not problem.startswith("cp=") or tp == 1:
            space.reject(f"cp={cp}" if problem.startswith("cp=") else f"tp={tp}", problem)
    if pinned.cp is None and job.cps == (1,):
        space.reject("cp≥2", "tried where the best plan waits, or nothing fits without")
    beyond = [tp for tp in divisors(job.num_devices) if tp > job.devices_per_node]
    if pinned.tp is None and beyond:
        where = f"the {counted(job.devices_per_node, 'device')} of a node"
        space.reject(f"tp≥{beyond[0]}", f"a tensor parallel group would span more than {where}")


def _expert_degrees(
    job: Job, pinned: Pinned, tp: int, cp: int, replicas: int, space: Space
) -> Iterator[int]:
    """The expert parallel degrees of so many replicas, or of the ranks of a larger tp."""
    if pinned.ep is not None:
        if tp > 1 or replicas % pinned.ep == 0:
            yield pinned.ep
        else:
            what = f"dp={replicas // cp}, tp=1"
            space.reject(what, f"ep={pinned.ep} does not divide the {counted(replicas, 'replica')}")
        return
    yield 1
    if not job.experts:
        return
    several = divisors(math.gcd(job.experts, replicas))[1:] if tp == 1 else [tp]
    for ep in several:
        problem = job.problem(tp, cp, ep)
        if problem is None:
            yield ep
        else:
            space.reject(f"ep={ep}, tp={tp}", problem)


def _pipelines(job: Job, pinned: Pinned, ranks: int, space: Space) -> Iterator[tuple[int, int]]:
    """The pp and dp of so many ranks of tp and cp."""
    if pinned.dp and pinned.pp:
        if ranks * pinned.pp * pinned.dp <= job.num_devices:
            yield from _fitting(job, pinned.pp, pinned.dp, space)
        return
    rest = job.num_devices // ranks
    for pp in divisors(rest) if pinned.pp is None else [pinned.pp]:
        if rest % pp or (pinned.dp is not None and rest // pp != pinned.dp):
            continue
        yield from _fitting(job, pp, rest // pp, space)


def _fitting(job: Job, pp: int, dp: int, space: Space) -> Iterator[tuple[int, int]]:
    if pp > job.num_segments:
        space.reject(f"pp≥{pp}", f"the model has {job.segments}")
    elif job.global_batch % dp:
        space.reject(f"dp={dp}", f"does not divide the global batch of {job.global_batch}")
    else:
        yield pp, dp


def _microbatches(job: Job, pinned: Pinned, dp: int, space: Space) -> Iterator[int]:
    samples = job.global_batch // dp
    if pinned.microbatch is not None:
        if samples % pinned.microbatch:
            space.reject(
                f"dp={dp}",
                f"its {counted(samples, 'sample')} a step are no multiple of "
                f"microbatch={pinned.microbatch}",
            )
        else:
            yield pinned.microbatch
        return
    microbatch = 1
    while samples % microbatch == 0 and microbatch <= job.most_microbatch:
        yield microbatch
        microbatch *= 2
    if samples % microbatch == 0:
        space.reject(f"microbatch≥{microbatch}", "tried where the best plan has half as many")


def _variants(job: Job, pinned: Pinned, base: Candidate, space: Space) -> Iterator[Candidate]:
    """A layout in all its schedules, with all that can be switched on."""
    values = searched_values(base)
    values |= {name: (pinned.choices[name],) for name in values if name in pinned.choices}
    same = {own.name: getattr(base, own.name) for own in fields(base)}
    for name, options, traits in _schedules(job, pinned, base, space):
        of_schedule = same | {"schedule": name, "schedule_options": options}
        for combination in itertools.product(*values.values()):
            own = Candidate(**of_schedule | dict(zip(values, combination, strict=True)))
            if own.sub_pipelining == "on" and own.sequence_parallel:
                space.reject("sub-pipelining with sequence parallelism", "no all-reduces to hide")
            elif problem := _excluded(job, own, traits):
                of_experts = "experts over replicas" if own.form.spreads_experts else own.schedule
                space.reject(f"zero={own.zero}" if own.zero else of_experts, problem.rstrip("."))
            else:
                yield own


def _excluded(job: Job, own: Candidate, traits: Traits) -> str | None:
    """Why choices of a candidate exclude each other; None where they do not."""
    choices = Reductions(
        name=own.schedule,
        schedule=traits,
        zero=own.zero,
        compression=job.common.gradient_compression,
        local_steps=job.common.local_steps,
        ep=own.ep if own.form.spreads_experts else 1,
        sub_pipelined=own.sub_pipelining == "on",
        drops_layers=job.drops_layers,
        home=own.offload_optimizer,
        delays=job.common.delay_optimizer_update,
        replicas=own.replicas,
        zero_group_size=own.zero_group_size,
        hierarchy=job.common.hierarchical_reductions,
    )
    low = low_sums_problem(own.zero, "parameters are of a lower one") if job.low_sums else None
    return problem_of(choices) or low


def _schedules(
    job: Job, pinned: Pinned, base: Candidate, space: Space
) -> Iterator[tuple[str, Mapping[str, Any], Traits]]:
    """The schedules that a layout can have: the pinned one, or those that are searched."""
    tried: Iterable[tuple[str, Mapping[str, Any]]] = ((base.schedule, base.schedule_options),)
    if pinned.schedule is not None:
        tried = ((pinned.schedule, pinned.schedule_options),)
    elif base.pp > 1:
        tried = registry.searched()
    for name, options in tried:
        what = " ".join([name, *(f"{key}={value}" for key, value in options.items())])
        try:
            traits = registry.traits(name, base.pp, base.num_microbatches, options)
            where, why = _schedule_problem(job, pinned, base, name, traits)
        except ScheduleError as error:
            where, why = f", pp={base.pp}" if pinned.schedule else "", str(error).rstrip(".")
        if not why:
            yield name, options, traits
            continue
        if pinned.schedule:
            space.refusal = space.refusal or why
        space.reject(f"{what}{where}", why)


def _schedule_problem(
    job: Job, pinned: Pinned, base: Candidate, name: str, traits: Traits
) -> tuple[str, str]:
    """The further choices and the reason why a schedule is left out; "" where it is not."""
    stages = counted(traits.num_stages, "stage")
    if registry.takes_costs(name):
        return "", ""
    if base.partition is not None and len(base.partition) != traits.num_stages:
        return f", pp={base.pp}", f"its {stages} are not the partition's {len(base.partition)}"
    if traits.num_stages > job.num_segments:
        return f", pp≥{base.pp}", f"{stages} or more for {job.segments}"
    if not traits.is_synchronous and pinned.schedule is None:
        return "", "trains with several versions of the weights; pin it to have it"
    return "", ""
