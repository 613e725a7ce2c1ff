"""The summary of a job before its first step: ranks, stages, memory, the pipeline's bubble."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from merak.core.errors import MerakError
from merak.core.mesh import Mesh, crosses_hosts, describe_hosts
from merak.core.tensor_meta import Signature, largest_shape
from merak.core.units import count, ranges, size, step_time, table_lines
from merak.graph.chunked_loss import chunked_heads
from merak.plan.activations.forecast import Forecast
from merak.plan.cluster.fit import non_tensor_on
from merak.plan.cost.device import DeviceProfile
from merak.plan.cost.float8_products import float8_sentence
from merak.plan.cost.float32_products import float32_products
from merak.plan.cost.gpu_kernels import attention_sentence
from merak.plan.expected.times import expected_times
from merak.plan.options import LOSS_CHUNK_BYTES
from merak.plan.step_plans import StepPlans
from merak.schedule.costs import uniform
from merak.schedule.ir import Schedule
from merak.schedule.simulator.simulate import simulate

IDLE = 0.5
"""Bubble fraction from which a message recommends more microbatches."""

_ENOUGH = 4
"""Microbatches per pp rank with which common schedules idle a fifth of a step."""


def describe_mesh(mesh: Mesh) -> str:
    """A mesh in a line: how many ranks, where, and the degrees."""
    device = mesh.device.type
    if device == "cuda":
        device = torch.cuda.get_device_name(mesh.device)
    ranks = f"{mesh.world_size} rank{'s' * (mesh.world_size > 1)}"
    degrees = f"({device}): dp {mesh.dp} × tp {mesh.tp} × pp {mesh.pp}"
    if mesh.cp > 1:
        degrees += f" × cp {mesh.cp}"
    if mesh.ep > 1:
        degrees += f", ep {mesh.ep} over {'replicas' if mesh.spreads_experts else 'tp'}"
    if not mesh.hosts:
        return f"{ranks} on 1 host {degrees}"
    across = [axis for axis in ("tp", "cp", "dp", "pp") if crosses_hosts(mesh, axis)]
    where = f"{len(set(mesh.hosts))} hosts ({describe_hosts(mesh.hosts)})"
    return f"{ranks} on {where} {degrees}, with {' and '.join(across)} across hosts"


def summary(forecast: Forecast, sample: Signature, profile: DeviceProfile | None = None) -> str:
    """A job's layout in a few lines, for people.

    Args:
        forecast: of the job, with its stages.
        sample: the columns of a microbatch.
        profile: known speeds of a rank's device; None for none.
    """
    graph, schedule = forecast.layout.graph, forecast.layout.schedule
    parameters = sum(math.prod(meta.shape) for meta in graph.parameters.values())
    lines = [
        f"{type(forecast.model).__name__}: {count(parameters)} parameters in "
        f"{len(graph.segments)} segments",
        f"  {schedule.name}: {schedule.num_microbatches} microbatch"
        f"{'es' * (schedule.num_microbatches > 1)}{_shape(sample)} a step and replica"
        + (f", bubble {bubble(schedule):.0%} of all time" if schedule.num_ranks > 1 else ""),
        _expected(forecast, profile),
        *table_lines([_HEAD, *_rows(forecast)], left=range(4), indent="  "),
    ]
    if forecast.mesh.device.type == "cuda":  # elsewhere float32 is no slower
        in_float32 = float32_products((segment.graph, 1) for segment in graph.segments)
        attention = attention_sentence((s.graph for s in graph.segments), graph.queried)
        lines += [f"  {sentence}" for sentence in (attention, in_float32) if sentence is not None]
    if (factor := forecast.options.expert_capacity) is not None:
        lines.append(
            f"  expert_capacity={factor:g}: each expert computes at most {factor:g} times its even "
            "share of a replica's microbatch; rows beyond it are dropped"
        )
    lines += [f"  loss_chunk_bytes: {heads}" for heads in _heads(forecast)]
    if forecast.options.fp8:
        lines.append(f"  fp8: {float8_sentence(forecast.local_model.segments)}")
    lines += [f"  {own}" for own in (*_tied_across_hosts(forecast), *forecast.on_autograd)]
    return "\n".join(lines)


def _heads(forecast: Forecast) -> Iterator[str]:
    """Which heads make their logits in chunks; that none does, where the user has given a size."""
    chunk_bytes = forecast.options.loss_chunk_bytes
    found = [
        f"the logits of {name} are made for {rows:,} of {whole:,} rows at a time"
        for name, rows, whole in chunked_heads(forecast.local_model.segments)
    ]
    if found:
        yield "; ".join(found)
    elif chunk_bytes and chunk_bytes != LOSS_CHUNK_BYTES:
        yield "no logits take less memory in chunks of this size"


def _tied_across_hosts(forecast: Forecast) -> Iterator[str]:
    """What a network between pp ranks carries for tied weights, where less would do."""
    layout, mesh = forecast.layout, forecast.mesh
    number = layout.schedule.num_microbatches
    if not forecast.options.exact_tied_gradients or number == 1 or not crosses_hosts(mesh, "pp"):
        return
    holders = Counter(name for rank in range(mesh.pp) for name in _read_by(forecast, rank))
    shared = [name for name, ranks in holders.items() if ranks > 1]
    metas = [layout.graph.parameters[name] for name in shared]
    trained = sum(meta.num_bytes for meta in metas if meta.requires_grad)
    if trained:
        yield (
            f"pp ranks on several hosts exchange the gradients of tied weights ({size(trained)}) "
            f"after each of {number} microbatches; tied_gradients='step' exchanges them once"
        )


def _read_by(forecast: Forecast, rank: int) -> dict[str, None]:
    """Parameters that a pipeline rank's stages read, by name."""
    layout = forecast.layout
    segments = (
        layout.graph.segments[i]
        for stage in layout.schedule.stages_of(rank)
        for i in layout.partition.stages[stage]
    )
    return dict.fromkeys(name for segment in segments for name in segment.parameters)


_HEAD = ("ranks", "stages", "segments", "", "parameters", "memory forecast")


def _expected(forecast: Forecast, profile: DeviceProfile | None) -> str:
    """What a rank is expected to hold, and to compute where the device's speeds are known."""
    times = expected_times(forecast, profile)
    seconds = "" if times is None else f", {step_time(times.pipeline_s)} of computation a step"
    own = None if profile is None else non_tensor_on(profile, forecast.mesh)
    others = "" if own is None else f", beside it {own}"
    return f"  forecast of a rank: peak memory below{others}{seconds}"


def _rows(forecast: Forecast) -> list[tuple[str, ...]]:
    """A row for each pipeline rank."""
    layout, mesh = forecast.layout, forecast.mesh
    memory = _memory(forecast)
    rows: list[tuple[str, ...]] = []
    for rank in range(mesh.pp):
        stages = layout.schedule.stages_of(rank)
        segments = [layout.graph.segments[i] for s in stages for i in layout.partition.stages[s]]
        names = _read_by(forecast, rank)
        first = rank * mesh.replicas * mesh.tp
        rows.append(
            (
                ranges(range(first, first + mesh.replicas * mesh.tp)),
                ranges(list(stages)),
                ranges(sorted(segment.index for segment in segments)),
                first_to_last([segment.name for segment in segments]),
                count(sum(math.prod(layout.graph.parameters[name].shape) for name in names)),
                memory[rank],
            )
        )
    return rows


def first_to_last(names: Sequence[str]) -> str:
    """Names of the first and the last segment of a rank; the last without what they share.

    Args:
        names: of the rank's segments; empty where a segment has none.
    """
    ends = [name for name in (names[0], names[-1]) if name]
    if len(set(ends)) < 2:
        return "".join(ends[:1])
    first, last = (name.split(".") for name in ends)
    shared = 0
    while shared < min(len(first), len(last) - 1) and first[shared] == last[shared]:
        shared += 1
    return f"{ends[0]} … {'.'.join(last[shared:])}"


def _memory(forecast: Forecast) -> Sequence[str]:
    if forecast.own_ranks is None:
        return ["unknown"] * forecast.mesh.pp
    return [size(rank.peak.total_bytes) for rank in forecast.own_ranks]


def _shape(sample: Signature) -> str:
    shape = largest_shape(sample)
    return " of " + " × ".join(map(str, shape)) if shape else ""


def bubble(schedule: Schedule) -> float:
    """The bubble fraction of a schedule with equal stages: idle time ÷ total time."""
    return simulate(schedule, uniform(schedule.num_stages)).bubble_fraction


def idle_pipeline(plans: StepPlans, option: str) -> str | None:
    """The message about steps with too few microbatches for the pipeline.

    Args:
        plans: of the job.
        option: what the user sets the number of microbatches with.

    Returns:
        A sentence; None where the ranks are busy for more than half of the time.
    """
    schedule = plans.base.schedule
    if schedule.num_ranks == 1 or bubble(schedule) < IDLE:
        return None
    ranks, given = schedule.num_ranks, schedule.num_microbatches
    enough = _ENOUGH * ranks
    try:
        better = f"; {option}={enough} would leave {bubble(plans.of_as_many(enough)):.0%}"
    except MerakError:
        better = f"; use more, such as {option}={enough}"
    microbatches = f"microbatch{'es' * (given > 1)}"
    return (
        f"{option}={given} gives the pipeline of {ranks} ranks {given} {microbatches} a step, "
        f"which leaves them idle {bubble(schedule):.0%} of the time{better}."
    )
