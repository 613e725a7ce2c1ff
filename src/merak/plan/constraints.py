"""Constraints on a layout by the model and its schedule, each with its error message.

What excludes each other by how gradients are reduced is told once, as sentences: jobs are refused
with them, and searches leave layouts out.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from merak.core.errors import ScheduleError
from merak.core.mesh import EXPERT_REPLICAS, REPLICAS, Mesh
from merak.graph.expert_parallel.apply import spread_weights
from merak.graph.trace.branches.flags import is_condition, optional_parameters
from merak.plan.cluster.hierarchy import hierarchy_of, replica_lines
from merak.plan.engine_options import EngineOptions
from merak.plan.gradient_compression import AUTO
from merak.plan.layout import Layout
from merak.plan.optimizer.home import is_away
from merak.plan.options import ParallelOptions
from merak.plan.tied_parameters import find_holders
from merak.schedule.ir import Schedule


class ReducedSchedule(Protocol):
    """What the rules ask of a schedule, or of the traits of one that is not built."""

    @property
    def is_synchronous(self) -> bool:
        """Whether there is one version of the weights."""

    @property
    def splits_backwards(self) -> bool:
        """Whether weight gradients have actions of their own."""

    @property
    def num_copies(self) -> int:
        """Copies of the model on the ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reductions:
    """Choices of a job by which its replicas reduce gradients.

    Args:
        name: of the schedule.
        schedule: what it does.
        zero: the ZeRO stage.
        compression: of gradients; "off" for none.
        local_steps: between two averages of Local SGD; 0 for none.
        ep: replicas that have the experts of a layer between them; 1 where each has all.
        sub_pipelined: whether microbatches run as sub-microbatches.
        drops_layers: whether a step may leave parameters without a gradient.
        home: of the optimizer's states, as of `plan.optimizer.home`.
        delays: whether the optimizer's steps are delayed by one.
        replicas: dp × cp.
        zero_group_size: replicas that shard by ZeRO between them; 0 for all.
        hierarchy: the option `hierarchical_reductions`.
    """

    name: str
    schedule: ReducedSchedule
    zero: int = 0
    compression: str = "off"
    local_steps: int = 0
    ep: int = 1
    sub_pipelined: bool = False
    drops_layers: bool = False
    home: str | None = None
    delays: bool = False
    replicas: int = 1
    zero_group_size: int = 0
    hierarchy: str = "off"


def problem_of(own: Reductions) -> str | None:
    """The sentence of the first rule that the choices break; None where they may be together."""
    return next((why for rule in _RULES if (why := rule(own)) is not None), None)


def _copies_with_zero(own: Reductions) -> str | None:
    if not own.zero or (own.schedule.is_synchronous and own.schedule.num_copies == 1):
        return None
    named = f"schedule={own.name!r}"
    if not own.schedule.is_synchronous:
        return (
            f"zero={own.zero} shards the optimizer over the replicas of a stage, but {named} keeps "
            "several versions of its weights; use zero=0, or a schedule such as '1f1b'."
        )
    if own.zero > 1:
        return (
            f"zero={own.zero} shards gradients or parameters between microbatches, but {named} has "
            "several copies of a stage, which have microbatches of their own; use zero=1, or a "
            "schedule such as '1f1b'."
        )
    others = {
        f"ep={own.ep}": own.ep > 1,
        f"zero_group_size={own.zero_group_size}": own.zero_group_size,
        f"hierarchical_reductions={own.hierarchy!r}": own.hierarchy != "off",
    }
    for other, is_given in others.items():
        if is_given:
            return (
                f"zero=1 shards the optimizer over all copies of a stage of {named}, but {other} "
                "reduces over some of them; use zero=0, or leave the other out."
            )
    return None


def _zero_groups(own: Reductions) -> str | None:
    size, replicas = own.zero_group_size, own.replicas
    named = f"zero_group_size={size}"
    if not own.zero or not size:
        return None
    if size == 1 or replicas % size:
        return (
            f"{named} makes no groups of dp × cp = {replicas} replicas; use a number above 1 that "
            "divides it, such as the ranks of a node, or 0 for all replicas."
        )
    if size == replicas:
        return None
    if own.ep > 1:
        return (
            f"{named} shards all parameters over the same groups, but with ep={own.ep} replicas "
            "have different experts; use experts over tp, or zero_group_size=0."
        )
    if own.hierarchy != "off":
        return (
            f"{named} reduces inside groups and then between them, and hierarchical_reductions="
            f"{own.hierarchy!r} inside nodes and then between them; use one of the two."
        )
    return None


def _sub_microbatches_with_zero_3(own: Reductions) -> str | None:
    return sub_pipelining_problem(own.zero) if own.sub_pipelined else None


def _dropped_layers_with_zero_3(own: Reductions) -> str | None:
    if own.zero == 3 and own.drops_layers:
        return (
            "zero=3 reduces the gradients of a segment on all replicas, but the model drops "
            "layers at random, or has experts or modules that use their parameters for some values "
            "alone, each replica its own; use zero=2, or switch the dropping off: layer_keep=1, or "
            "the model's config."
        )
    return None


def _compression(own: Reductions) -> str | None:
    named = f"gradient_compression={own.compression!r}"
    if own.compression == "off":
        return None
    if own.compression == AUTO:
        return (
            f"{named} is chosen with the plan; use plan='auto' or merak plan, or a compression "
            "such as 'bf16'."
        )
    if own.zero:
        return (
            f"{named} compresses all-reduces of whole gradients, but zero={own.zero} "
            "reduce-scatters them, which torch's compressors do not; use zero=0, or "
            "gradient_compression='off'."
        )
    if own.ep > 1:
        return (
            f"{named} compresses what all replicas reduce together, but they hold different "
            f"experts with ep={own.ep}; use ep=1, or gradient_compression='off'."
        )
    if not own.schedule.is_synchronous:
        return (
            f"{named} compresses gradients that replicas reduce once a step, but "
            f"schedule={own.name!r} updates weights inside a step; use a synchronous "
            "schedule such as '1f1b', or gradient_compression='off'."
        )
    return None


def _local_steps(own: Reductions) -> str | None:
    named = f"local_steps={own.local_steps}"
    if not own.local_steps:
        return None
    if not own.schedule.is_synchronous:
        return (
            f"{named} counts optimizer steps, but schedule={own.name!r} updates "
            "weights several times inside one; use local_steps=0, or a synchronous schedule such "
            "as '1f1b'."
        )
    if own.zero:
        return (
            f"{named} has every replica step all parameters on its own, but "
            f"zero={own.zero} shards them over the replicas; use zero=0 with a larger tp or "
            "pp, or local_steps=0."
        )
    if own.compression != "off":
        return (
            f"{named} leaves out the reductions that gradient_compression="
            f"{own.compression!r} compresses; use one of the two."
        )
    if own.ep > 1:
        return (
            f"{named} has every replica step on its own, but with ep={own.ep} they "
            "have the experts of a layer between them; use ep=1, or experts over tp."
        )
    if is_away(own.home):
        return (
            f"{named} averages what optimizers step on the devices, but offload_optimizer="
            f"{own.home!r} has it in host memory; use one of the two."
        )
    return None


def _delayed_updates(own: Reductions) -> str | None:
    named = "delay_optimizer_update=True"
    if not own.delays:
        return None
    if not is_away(own.home):
        return (
            f"{named} lets the processor step while the device trains on, but the optimizer steps "
            "on the device; add offload_optimizer='cpu', or leave it out."
        )
    if not own.schedule.is_synchronous:
        return (
            f"{named} delays the one update behind a step, but schedule={own.name!r} updates "
            "weights several times inside one, beside which it computes already; use a "
            "synchronous schedule such as '1f1b', or leave it out."
        )
    return None


_RULES: tuple[Callable[[Reductions], str | None], ...] = (
    _copies_with_zero,
    _zero_groups,
    _sub_microbatches_with_zero_3,
    _dropped_layers_with_zero_3,
    _compression,
    _local_steps,
    _delayed_updates,
)


def low_sums_problem(zero: int, what: str) -> str | None:
    """Why ZeRO 3 cannot reduce gradients of a lower precision that no float32 master is stepped by.

    Args:
        zero: the ZeRO stage.
        what: the parameters, with their verb and type, such as "'weight' is of torch.bfloat16".
    """
    if zero != 3:
        return None
    return (
        f"zero=3 reduces gradients in the optimizer's type, and {what}; set master_weights=True "
        "and leave gradient_sums='float32', or use zero=2."
    )


def sub_pipelining_problem(zero: int) -> str | None:
    """Why sub-microbatches cannot be run with a ZeRO stage.

    Args:
        zero: the ZeRO stage.
    """
    if zero != 3:
        return None
    return (
        "zero=3 gathers the parameters of one segment at a time, but sub_pipelining='on' runs "
        "sub-microbatches of several; use zero=2, or sub_pipelining='off'."
    )


def refuse_reductions(schedule: Schedule, options: ParallelOptions, mesh: Mesh) -> None:
    """Refuse ways in which replicas cannot reduce gradients, or bring parameters together.

    Args:
        schedule: that of a step.
        options: how the job is laid out.
        mesh: the degrees, and the hosts.

    Raises:
        ScheduleError: the schedule or the degrees do not allow them, or they exclude each other.
    """
    if not options.local_steps and options.outer_optimizer != "average":
        raise ScheduleError(
            f"outer_optimizer={options.outer_optimizer!r} steps after every local_steps steps, but "
            "local_steps=0; give local_steps, such as 100, or outer_optimizer='average'."
        )
    if options.local_steps and options.ema_decay is not None:
        raise ScheduleError(
            f"ema_decay={options.ema_decay} averages parameters that are the same on all replicas, "
            f"but with local_steps={options.local_steps} each has its own between rounds; use one "
            "of the two."
        )
    if options.zero_group_size and not options.zero:
        raise ScheduleError(
            f"zero_group_size={options.zero_group_size} is of the replicas that shard by zero, but "
            "zero=0; give zero=3, 2 or 1, or leave it out."
        )
    if problem := problem_of(reductions_of(schedule, options, mesh)):
        raise ScheduleError(problem)
    refuse_hierarchy(schedule, options, mesh)


def reductions_of(schedule: Schedule, options: ParallelOptions, mesh: Mesh) -> Reductions:
    """Choices of a job by which its replicas reduce gradients.

    Args:
        schedule: that of a step.
        options: how the job is laid out.
        mesh: the degrees.
    """
    return Reductions(
        name=schedule.name,
        schedule=schedule,
        zero=options.zero,
        compression=options.gradient_compression,
        local_steps=options.local_steps,
        ep=mesh.ep if mesh.spreads_experts else 1,
        home=options.offload_optimizer,
        delays=options.delay_optimizer_update,
        replicas=mesh.replicas,
        zero_group_size=options.zero_group_size,
        hierarchy=options.hierarchical_reductions,
    )


def refuse_hierarchy(schedule: Schedule, options: ParallelOptions, mesh: Mesh) -> None:
    """Refuse hierarchical reductions where they have one level, or nothing to reduce.

    Args:
        schedule: that of a step.
        options: how the job is laid out.
        mesh: the degrees, and the hosts.

    Raises:
        ScheduleError: there is no group of replicas with two levels, or they do not reduce whole
            gradients in every step.
    """
    if options.hierarchical_reductions == "off":
        return
    named = f"hierarchical_reductions={options.hierarchical_reductions!r}"
    if options.local_steps:
        raise ScheduleError(
            f"{named} reduces gradients by hierarchy, but local_steps={options.local_steps} leaves "
            "their reductions out; use one of the two."
        )
    if options.gradient_compression != "off":
        raise ScheduleError(
            f"{named} adds gradients up in two levels, but gradient_compression="
            f"{options.gradient_compression!r} compresses them for one; use one of the two."
        )
    if options.hierarchical_reductions == "on" and not has_levels(schedule, mesh):
        raise ScheduleError(f"{named} {_why_one_level(mesh)}; use hierarchical_reductions='off'.")


def has_levels(schedule: Schedule, mesh: Mesh) -> bool:
    """Whether a group of replicas has several ranks on a node, and several nodes.

    Args:
        schedule: that of a step.
        mesh: the degrees, and the hosts.
    """
    axes = (REPLICAS, EXPERT_REPLICAS) if mesh.spreads_experts else (REPLICAS,)
    lines = [own for axis in axes for own in replica_lines(mesh, schedule, axis)]
    return any(hierarchy_of(ranks, mesh.hosts) is not None for own in lines for ranks in own)


def _why_one_level(mesh: Mesh) -> str:
    if not mesh.hosts:
        return "reduces inside nodes and then between them, but all ranks are on one node"
    return (
        f"reduces inside nodes and then between them, but with dp={mesh.dp}, tp={mesh.tp} and "
        f"pp={mesh.pp} on {len(set(mesh.hosts))} nodes no stage has several replicas on each of "
        "several nodes"
    )


def refuse_compressed_sparse(kind: str, names: Iterable[str]) -> None:
    """Refuse compressed reductions of sparse gradients.

    Args:
        kind: of compression; "off" for none.
        names: of parameters with sparse gradients in the model.

    Raises:
        ScheduleError: there is one.
    """
    for name in sorted(names) if kind != "off" else ():
        raise ScheduleError(
            f"gradient_compression={kind!r} compresses dense gradients, but {name} has sparse ones;"
            " use sparse=False in its embedding, or gradient_compression='off'."
        )


def refuse_tied_stages(layout: Layout, owners: Mapping[str, frozenset[int]]) -> None:
    """Refuse parameters tied across stages that are updated at different times.

    Args:
        layout: the model, laid out over such stages.
        owners: stages that read a parameter, by its name.

    Raises:
        ScheduleError: two stages read one.
    """
    for name, stages in owners.items():
        if len(stages) > 1:
            raise ScheduleError(
                f"schedule={layout.schedule.name!r} updates stages at different times, but stages "
                f"{', '.join(map(str, sorted(stages)))} share the parameter {name!r}; use a "
                "synchronous schedule such as '1f1b', or a model without tied weights."
            )


def refuse_gradient_hooks(
    model: nn.Module,
    layout: Layout,
    options: EngineOptions,
    split: Container[str],
    sub_pipelined: bool,
) -> None:
    """Refuse hooks on gradients that autograd never accumulates whole on the parameter.

    Args:
        model: the model before its parameters are laid out.
        layout: as it is laid out.
        options: how it is run.
        split: names of the parameters that tensor parallelism shards.
        sub_pipelined: whether microbatches run as sub-microbatches.

    Raises:
        ScheduleError: there is such a hook.
    """
    for name, parameter in model.named_parameters():
        if not (parameter._backward_hooks or parameter._post_accumulate_grad_hooks):
            continue
        reason = _why_unhooked(name, layout, options)
        if parameter.is_meta:
            reason = (
                "is replaced when it gets its weights; register the hook once the model has weights"
            )
        if name in split:
            reason = f"is split over tp; give it Replicate() in the feature dict: {name}"
        if sub_pipelined:
            reason = "gets one from each sub-microbatch; use sub_pipelining='off'"
        if reason:
            raise ScheduleError(f"{name} has a hook on its gradient, but it {reason}.")


def refuse_later_hooks(model: nn.Module, layout: Layout, options: EngineOptions) -> None:
    """Refuse hooks on gradients that a script has registered on the model as it is laid out.

    Args:
        model: the user's, laid out.
        layout: as it is laid out.
        options: how it is run.

    Raises:
        ScheduleError: there is one on a gradient that autograd never accumulates whole there.
    """
    for name, parameter in model.named_parameters():
        hooked = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
        reason = _why_unhooked(name, layout, options) if hooked else ""
        if reason:
            raise ScheduleError(f"{name} has a hook on its gradient, but it {reason}.")


def _why_unhooked(name: str, layout: Layout, options: EngineOptions) -> str:
    schedule = layout.schedule
    if sum(name in segment.parameters for segment in layout.graph.segments) > 1:
        return "is read by several segments, which sum what they give; do it in the model"
    if options.zero == 3:
        return "is sharded under zero=3; use zero=2"
    if not schedule.is_synchronous or schedule.splits_backwards:
        return f"is computed apart under schedule={schedule.name!r}; use '1f1b'"
    return ""


def refuse_tied_copies(layout: Layout, zero: int) -> None:
    """Refuse ZeRO where a parameter is read on copies of one stage and on others of another.

    Args:
        layout: the model, laid out.
        zero: the ZeRO stage.

    Raises:
        ScheduleError: with the parameter and the pp ranks.
    """
    schedule = layout.schedule
    if not zero or schedule.num_copies == 1:
        return
    readers: dict[str, set[tuple[int, ...]]] = {}
    for stage, own in enumerate(layout.partition.stages):
        for segment in layout.graph.segments[own.start : own.stop]:
            for name in segment.parameters:
                readers.setdefault(name, set()).add(schedule.ranks_of(stage))
    for name, ranks in readers.items():
        if len(ranks) > 1:
            raise ScheduleError(
                f"zero={zero} shards the optimizer over the copies of a stage, but {name!r} is "
                f"read on pp ranks {' and '.join(map(str, sorted(ranks)))}, each of which have "
                f"copies of a stage of schedule={schedule.name!r}; use zero=0, or a schedule such "
                "as '1f1b'."
            )


def refuse_optional_layers(layout: Layout, zero: int, mesh: Mesh) -> None:
    """Refuse optional layers, which a step may skip, where every gradient is expected.

    Args:
        layout: the model, laid out.
        zero: the ZeRO stage.
        mesh: the degrees.

    Raises:
        ScheduleError: the layout does not allow them.
    """
    _refuse_dropped_experts(layout, mesh)
    optional = {s.index: frozenset(optional_parameters(s)) for s in layout.graph.segments}
    if not any(optional.values()):
        return
    own = Reductions(
        name=layout.schedule.name, schedule=layout.schedule, zero=zero, drops_layers=True
    )
    if problem := problem_of(own):
        raise ScheduleError(problem)
    if not layout.schedule.is_synchronous:
        return
    always = {n for s in layout.graph.segments for n in s.parameters if n not in optional[s.index]}
    for pipe in range(len(layout.schedule.pipes)):
        for name, holders in find_holders(layout.readers(pipe)).items():
            if len(holders) > 1 and name not in always:
                raise ScheduleError(
                    f"the parameter {name!r} is shared by layers on pp ranks "
                    f"{', '.join(str(h.rank) for h in reversed(holders))}, all of which a step "
                    "may leave out, by chance or by the values of a batch; use pp=1, or switch the "
                    "dropping off in the model's config."
                )


def _refuse_dropped_experts(layout: Layout, mesh: Mesh) -> None:
    """Refuse layers that chance drops where replicas that draw otherwise exchange tokens."""
    if not mesh.spreads_experts or mesh.cp % mesh.ep == 0:  # whose ranks draw the same
        return
    experts = spread_weights(layout.graph)
    for segment in layout.graph.segments:
        drops = any(is_condition(node) for node in segment.graph.nodes)
        if drops and experts.intersection(segment.parameters):
            raise ScheduleError(
                f"replicas exchange tokens in {segment.name} with ep={mesh.ep}, but each drops "
                "layers by draws of its own; use experts over tp, an ep that divides cp, or switch "
                "the dropping off: layer_keep=1, or the model's config."
            )
