"""`merak trace`: the segments of a model, without its weights."""

from __future__ import annotations

import math
import re
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from merak.cli.devices import cluster, planned_cluster, sheet_device
from merak.cli.model import model_source, recipe_job
from merak.cli.options import ModelRequest, option, shared, takes
from merak.cli.output import show, stdout_to_stderr
from merak.core.errors import CommandError
from merak.core.units import count, counted, seconds, size, table_lines

if TYPE_CHECKING:
    from merak.core.mesh import Mesh
    from merak.graph.chunked_loss import RankRewrite
    from merak.graph.ir.ir import ModelGraph, Segment
    from merak.graph.segment.build import BuiltGraph
    from merak.graph.tensor_parallel.apply import TensorParallel
    from merak.graph.tensor_parallel.report import SegmentReport
    from merak.graph.trace.opaque.report import OpaqueModule
    from merak.plan.cluster.cluster import Cluster
    from merak.plan.cost.joint_operators import JointParts
    from merak.plan.cost.segments.operator_rows import SegmentOperators


@dataclass(frozen=True, slots=True)
class SegmentSummary:
    """Summary of one segment.

    Args:
        name: the module path it mostly comes from.
        parameters: numbers in the parameters it reads.
        split: how tensor parallelism splits them, by name.
        whole: why it replicates the others, by name.
        forward_collectives: how many activations tensor parallel ranks then sum or gather.
        backward_collectives: how many gradients of activations they sum or gather.
        shared_values: activations between split products whose sequence is sharded.
        values: number of activations between split products; 0 without sequence parallelism.
        gathered_for: operators between split products for which activations are gathered.
        forward_seconds: of a microbatch on one tensor parallel rank of the device that was named,
            with its collectives; None without a device.
        backward_seconds: likewise, without recomputation.
        attention: the kernels of its attention on that device, and why they are no better ones.
        autograd: why autograd runs its backward; empty where that is a graph.
    """

    name: str
    parameters: int
    split: dict[str, str] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    forward_collectives: int = 0
    backward_collectives: int = 0
    shared_values: int = 0
    values: int = 0
    gathered_for: list[str] = field(default_factory=list)
    forward_seconds: float | None = None
    backward_seconds: float | None = None
    attention: list[str] = field(default_factory=list)
    autograd: str = ""


@dataclass(frozen=True, slots=True)
class TraceReport:
    """Report of tracing a model and cutting it into segments.

    Args:
        model: the architecture's class name.
        parameters: numbers in all parameters, tied ones once.
        segments: how many segments.
        boundary_tensors: for every cut, in order, how many tensors cross it.
        seconds: `build` the model without weights, `trace`, `shard`, and `total`; a cached graph
            is loaded during `trace`.
        cached: whether the graph came from the cache.
        peak_rss_bytes: the most memory this process had.
        tp: the tensor parallel degree for which the splits are.
        tp_sharded_fraction: fraction of the parameters (numbers, not tensors) that it splits.
        sequence_parallel: whether its ranks shard the sequence between split products.
        parts: the segments, in order.
        kept_whole: opaque modules, which run as one operator each.
        device: that the times of the segments are for; None without one.
        cp: the context parallel degree.
        operators: of every different segment, where they were asked for.
        gathered_tokens: what context parallel ranks compute for all tokens, in a sentence; None
            where every rank computes its own tokens alone.
    """

    model: str
    parameters: int
    segments: int
    boundary_tensors: list[int]
    seconds: dict[str, float]
    cached: bool
    peak_rss_bytes: int
    tp: int
    tp_sharded_fraction: float
    sequence_parallel: bool = False
    parts: list[SegmentSummary] = field(default_factory=list)
    kept_whole: list[OpaqueModule] = field(default_factory=list)
    device: str | None = None
    cp: int = 1
    operators: list[SegmentOperators] = field(default_factory=list)
    gathered_tokens: str | None = None


@dataclass(frozen=True, kw_only=True)
class TraceRequest(ModelRequest):
    """Request for the segments of a model."""

    batch: int = option(1, "--batch", "B", "Samples of a microbatch.")
    tp: int = option(2, "--tp", "T", "Tensor parallel degree to derive splits for.", min=1)
    ep: int = option(1, "--ep", "E", "Expert parallel degree, 1 or that of tp.", min=1)
    cp: int = option(1, "--cp", "C", "Context parallel degree: ranks that share tokens.", min=1)
    sequence_parallel: bool = shared("sequence_parallel")
    no_cache: bool = option(
        False, "--no-cache", "", "Trace anew, and keep nothing for the next time."
    )
    operators: bool = option(
        False,
        "--operators",
        "",
        "Also list every operator, forward and backward, with its FLOPs and the bytes it saves.",
    )
    device: str | None = sheet_device("Also show the time of every segment.")
    cluster: str | None = cluster()


@takes(TraceRequest)
def trace(request: TraceRequest) -> None:
    """Trace a model without its weights and show the segments it is cut into."""
    with stdout_to_stderr():
        report = trace_report(request)
    show(report, _page, request.as_json)


def trace_report(request: TraceRequest) -> TraceReport:
    """Trace and cut a transformers model, as for training.

    Args:
        request: the model and its batch.

    Raises:
        CommandError: there is no such model, or the sizes do not fit it.
        TraceError: the model cannot be traced, or gives no loss.
    """
    # Heavy imports wait until a command is known to be well formed.
    from merak.arguments import default_trace_cache
    from merak.graph.segment.build import GraphSource, build_timed
    from merak.graph.weights.empty_weights import empty_weights
    from merak.zoo.batches.batch import example_arguments
    from merak.zoo.workload import example_batch, example_signature

    devices = planned_cluster(request.device, request.cluster, request.tp * request.cp)
    job = recipe_job(request)
    request, source = model_source(request, job)
    columns = dict(example_signature(source, request.sequence, request.batch))
    started = time.perf_counter()
    with empty_weights():
        module = source.build()
    built = time.perf_counter()
    folder = "" if request.no_cache else default_trace_cache()
    graph_source = GraphSource(
        module,
        fixed=example_arguments(source.model_class),
        cache_dir=Path(folder) if folder else None,
        example=example_batch(source, request.sequence),
    )
    timed = build_timed(graph_source, columns, training=True)
    return _report(source.name, request, timed, built - started, devices)


def _report(
    name: str, request: TraceRequest, timed: BuiltGraph, build_s: float, devices: Cluster | None
) -> TraceReport:
    from merak.core.elastic import Degrees, check_expert_degree
    from merak.graph.tensor_parallel.apply import auto_tensor_parallel
    from merak.graph.tensor_parallel.report import report_sharding
    from merak.graph.trace.opaque.report import report_opaque

    graph = timed.graph
    shapes = {name: math.prod(meta.shape) for name, meta in graph.parameters.items()}
    if request.tp == 1 and request.ep > 1:
        raise CommandError(
            f"--ep {request.ep} without --tp shares out experts over replicas, which changes no "
            f"segment but its experts; see `merak memory`, or give --tp {request.ep}."
        )
    ep = check_expert_degree(request.ep, Degrees(1, request.tp, 1))
    parallel = auto_tensor_parallel(graph, request.tp, sequence=request.sequence_parallel, ep=ep)
    splits = report_sharding(graph, parallel)
    num_parameters = sum(shapes.values())
    return TraceReport(
        model=name,
        parameters=num_parameters,
        segments=len(graph.segments),
        boundary_tensors=[len(crossing) for crossing in graph.boundaries()],
        seconds={
            "build": build_s,
            "trace": timed.trace_s,
            "shard": timed.shard_s,
            "total": build_s + timed.trace_s + timed.shard_s,
        },
        cached=timed.cached,
        peak_rss_bytes=peak_rss_bytes(),
        tp=request.tp,
        tp_sharded_fraction=sum(shapes[n] for n in parallel.weights) / (num_parameters or 1),
        sequence_parallel=request.sequence_parallel,
        parts=[
            replace(
                _part(segment, found, shapes, times),
                attention=_attention(segment, devices),
                autograd=obstacle,
            )
            for segment, found, (obstacle, times) in zip(
                graph.segments, splits, _backwards(graph, parallel, request, devices), strict=True
            )
        ],
        kept_whole=report_opaque(graph),
        device=None if devices is None else devices.nodes[0].device.name,
        cp=request.cp,
        operators=_operators(graph, parallel, request, devices) if request.operators else [],
        gathered_tokens=_gathered_tokens(graph, parallel, request.cp),
    )


def _gathered_tokens(graph: ModelGraph, parallel: TensorParallel, cp: int) -> str | None:
    from merak.graph.context_parallel.apply import context_parallel, gathered_operators

    if cp == 1:
        return None
    return gathered_operators(graph, context_parallel(graph, parallel, cp))


def _operators(
    graph: ModelGraph, parallel: TensorParallel, request: TraceRequest, devices: Cluster | None
) -> list[SegmentOperators]:
    from merak.core.mesh import pretended
    from merak.plan.cost.segments.operator_rows import segment_operators

    mesh, segments, fitted = _of_a_rank(graph, parallel, request)
    kernels = "cpu" if devices is None else devices.nodes[0].device.device_type
    with pretended(mesh):
        return segment_operators([fitted(own)[0] for own in segments], mesh.device, kernels)


def _of_a_rank(
    graph: ModelGraph, parallel: TensorParallel, request: TraceRequest
) -> tuple[Mesh, Sequence[Segment], RankRewrite]:
    """The mesh of a rank, the segments that fit it, and what makes them those that it runs."""
    import torch

    from merak.core.mesh import Mesh
    from merak.graph.context_parallel.apply import context_parallel

    whole = parallel if request.cp == 1 else context_parallel(graph, parallel, request.cp)
    local, fitted = whole.fit(graph)
    device = torch.device("cpu")
    mesh = Mesh(1, request.tp, 1, 0, device, None, cp=request.cp, ep=request.ep)
    return mesh, local.segments, fitted


def _backwards(
    graph: ModelGraph, parallel: TensorParallel, request: TraceRequest, devices: Cluster | None
) -> Iterator[tuple[str, tuple[float | None, float | None]]]:
    """Of every segment, why autograd runs its backward ("" where that is a graph), and its times.

    These are the seconds of its forward and backward on the first of some devices.
    """
    from merak.core.mesh import pretended
    from merak.graph.ir.structure import structural_key
    from merak.plan.cost.segments.measured import SegmentMemories

    mesh, segments, fitted = _of_a_rank(graph, parallel, request)
    kernels = "cpu" if devices is None else devices.nodes[0].device.device_type
    memories = SegmentMemories(mesh.device, kernels=kernels)
    known: dict[object, tuple[str, tuple[float | None, float | None]]] = {}
    for segment in segments:
        key = structural_key(segment.graph)
        if key not in known:
            with pretended(mesh):
                own = fitted(segment)[0]
                obstacle = memories.obstacle(own)
                joint = None if devices is None else memories.joint_parts(own)
            times = (None, None) if devices is None else _times(own, joint, request, devices)
            known[key] = obstacle, times
        yield known[key]


def _times(
    segment: Segment, joint: JointParts | None, request: TraceRequest, devices: Cluster
) -> tuple[float, float]:
    """Seconds of a segment's forward and backward on the first of some devices."""
    from merak.plan.cluster.groups import groups_of
    from merak.plan.cost.kernels.segment_kernels import KernelChoice, joint_kernels
    from merak.plan.price.segments import price_graph

    choice, device = KernelChoice(), devices.nodes[0].device
    kernels = None if joint is None else joint_kernels(joint, choice, device.device_type, 1)
    groups = groups_of(devices, request.tp, request.cp)
    price = price_graph(segment.graph, choice, device, groups, kernels)
    return price.forward_s, price.backward_s


def _attention(segment: Segment, devices: Cluster | None) -> list[str]:
    """Kernels of a segment's attention, where some GPU was named."""
    from merak.plan.cost.gpu_kernels import attention_kernels

    if devices is None or devices.nodes[0].device.device_type != "cuda":
        return []
    return [f"attention: {kernel}" for kernel in dict.fromkeys(attention_kernels(segment.graph))]


def _part(
    segment: Segment,
    found: SegmentReport,
    shapes: Mapping[str, int],
    times: tuple[float | None, float | None],
) -> SegmentSummary:
    return SegmentSummary(
        segment.name,
        sum(shapes[name] for name in segment.parameters),
        found.split,
        found.whole,
        found.forward,
        found.backward,
        found.sharded,
        found.values,
        list(found.gathered),
        *times,
    )


def peak_rss_bytes() -> int:
    """Return the peak resident memory of this process.

    `getrusage` counts the process that started this one too, so Linux is read from /proc.
    """
    status = Path("/proc/self/status")
    if status.exists():
        lines = status.read_text(encoding="ascii").splitlines()
        peaks = [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
        if peaks:
            return peaks[0] * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _page(report: TraceReport) -> str:
    from merak.graph.trace.opaque.report import opaque_lines

    most = max(report.boundary_tensors, default=0)
    took = report.seconds
    lines = [
        f"{report.model}: {count(report.parameters)} parameters, "
        f"{counted(len(report.parts), 'segment')}, at most {counted(most, 'tensor')} across a cut",
        "",
        *_segments(report.parts),
        "",
        *_operator_lines(report.operators),
        *opaque_lines(report.kept_whole),
        *_device_line(report),
        f"with tp={report.tp}, {report.tp_sharded_fraction:.0%} of the parameters are split; "
        f"{sum(p.forward_collectives for p in report.parts)} collectives of activations in the "
        f"forward, {sum(p.backward_collectives for p in report.parts)} in the backward",
        *_context_line(report),
        f"built in {took['build']:.2f} s, traced in {took['trace']:.2f} s, cut in "
        f"{took['shard']:.2f} s{', from the cache' if report.cached else ''}; "
        f"{size(report.peak_rss_bytes)} of memory at the most",
    ]
    return "\n".join(lines)


def _context_line(report: TraceReport) -> Iterator[str]:
    if report.cp > 1:
        yield report.gathered_tokens or f"cp={report.cp}: every rank computes its own tokens alone"


def _device_line(report: TraceReport) -> Iterator[str]:
    if report.device is not None:
        forward_s = sum(part.forward_seconds or 0.0 for part in report.parts)
        backward_s = sum(part.backward_seconds or 0.0 for part in report.parts)
        yield (
            f"on one of {report.tp} tensor parallel{_context(report)} {report.device}: "
            f"forward {seconds(forward_s)}, backward {seconds(backward_s)} for a microbatch, by "
            "the data sheet"
        )


def _context(report: TraceReport) -> str:
    return f" × {report.cp} context parallel" if report.cp > 1 else ""


def _segments(parts: Sequence[SegmentSummary]) -> Iterator[str]:
    """List the segments; the sharding of one is listed for the first of its kind."""
    shown: set[tuple[str, ...]] = set()
    for index, part in enumerate(parts):
        yield f"  {index:>4}  {part.name:<48} {count(part.parameters):>14}{_time(part)}"
        why = [f"backward by autograd: {part.autograd}"] if part.autograd else []
        lines = (*part.attention, *why, *_sharding_lines(part))
        if lines not in shown:
            shown.add(lines)
            yield from (f"        {line}" for line in lines)


def _operator_lines(found: Sequence[SegmentOperators]) -> Iterator[str]:
    """Lines of a table for each segment of its own kind."""
    for own in found:
        flops = dict.fromkeys(("forward", "backward", "weight gradient"), 0.0)
        for row in own.operators:
            flops[row.part] += row.flops
        saved_bytes = sum(row.saved_bytes for row in own.operators)
        sums = ", ".join(f"{part} {count(round(number))}" for part, number in flops.items())
        like = f" and {counted(own.count - 1, 'segment')} like it" if own.count > 1 else ""
        yield f"{own.name}{like}: FLOPs {sums}; saves {size(saved_bytes)}"
        if own.input_bytes:
            yield f"    and its inputs, {size(own.input_bytes)}"
        rows = [
            (
                row.part,
                row.operator,
                " × ".join(map(str, row.shape)),
                count(round(row.flops)) if row.flops else "",
                size(row.saved_bytes) if row.saved_bytes else "",
            )
            for row in own.operators
        ]
        headings = ("", "operator", "result", "FLOPs", "saved")
        yield from table_lines([headings, *rows], left=(0, 1, 2), indent="    ")
        yield ""


def _time(part: SegmentSummary) -> str:
    if part.forward_seconds is None or part.backward_seconds is None:
        return ""
    return f"  F {seconds(part.forward_seconds)}, B {seconds(part.backward_seconds)}"


def _sharding_lines(part: SegmentSummary) -> Iterator[str]:
    groups: dict[str, list[str]] = {}
    for kind, named in (("split", part.split), ("whole", part.whole)):
        for name, why in named.items():
            short = re.sub(r"^.*\.\d+\.", "", name.removeprefix(f"{part.name}."))
            groups.setdefault(f"{kind}: {why}", []).append(short)
    yield from (f"{how}: {', '.join(names)}" for how, names in groups.items())
    if part.values:
        gathered = f"; gathered for {', '.join(part.gathered_for)}" if part.gathered_for else ""
        yield f"on shares: {part.shared_values} of {part.values} activations{gathered}"
