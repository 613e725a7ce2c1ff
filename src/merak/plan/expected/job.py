"""Record of a job as it is laid out, made from its forecast before the first step."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import fields
from pathlib import Path

import torch

from merak.core.packages import installed_version
from merak.core.tensor_meta import Signature, largest_shape
from merak.plan.activations.forecast import Forecast
from merak.plan.cost.benchmark import device_name
from merak.plan.cost.operators import node_work
from merak.plan.engine_options import EngineOptions
from merak.plan.expected.speed import known_profile, peak_speed
from merak.plan.expected.times import ExpectedTimes, expected_times
from merak.plan.memory.model import RankMemory
from merak.plan.options import ParallelOptions
from merak.record.run import JobRecord, RankRecord, SegmentRecord

_PACKAGES = ("merak-train", "torch", "transformers")
_LONGEST = 200
"""Characters of an option's value; those of feature dicts may be many more."""


def job_record(
    forecast: Forecast,
    sample: Signature,
    cache: Path | None,
    autocast: torch.dtype | None = None,
) -> JobRecord:
    """Record of a job as it is laid out.

    Args:
        forecast: of the job.
        sample: columns of a microbatch.
        cache: folder of this machine's measured speeds.
        autocast: type of mixed precision; None for that of the parameters.
    """
    layout, mesh, options = forecast.layout, forecast.mesh, forecast.options
    graph = layout.graph
    profile = known_profile(options, mesh, cache)
    times = expected_times(forecast, profile)
    peak = peak_speed(profile, mesh.device, autocast or _dtype(forecast))
    on_gpu = mesh.device.type == "cuda"
    return JobRecord(
        model=type(forecast.model).__name__,
        parameters=sum(math.prod(meta.shape) for meta in graph.parameters.values()),
        degrees={axis: getattr(mesh, axis) for axis in ("dp", "tp", "pp", "cp", "ep")},
        device=device_name(mesh.device),
        on_gpu=on_gpu,
        device_bytes=torch.cuda.get_device_properties(mesh.device).total_memory if on_gpu else None,
        hosts=tuple(mesh.hosts),
        microbatch=largest_shape(sample),
        schedule=layout.schedule,
        stages=tuple(tuple(own) for own in layout.partition.stages),
        segments=_segments(forecast, times),
        memory=tuple(map(_memory, forecast.own_ranks or ())),
        recompute_s=() if times is None else times.recompute_s,
        flops=model_flops(forecast),
        peak_flops_per_s=peak.flops_per_s,
        peak_source=peak.source,
        options=_options(options),
        versions={name: installed_version(name) for name in _PACKAGES},
    )


def model_flops(forecast: Forecast) -> float:
    """FLOPs of a microbatch in the whole model, forward and backward, without recomputation."""
    works = [
        node_work(node, "cuda")
        for segment in forecast.layout.graph.segments
        for node in segment.graph.nodes
    ]
    return sum(kernel.flops for work in works for kernel in (*work.forward, *work.backward))


def _dtype(forecast: Forecast) -> torch.dtype:
    """Type of most parameters."""
    sizes: Counter[torch.dtype] = Counter()
    for meta in forecast.layout.graph.parameters.values():
        sizes[meta.dtype] += math.prod(meta.shape)
    return sizes.most_common(1)[0][0] if sizes else torch.float32


def _segments(forecast: Forecast, times: ExpectedTimes | None) -> tuple[SegmentRecord, ...]:
    graph = forecast.layout.graph
    found = []
    for segment in graph.segments:
        count = sum(math.prod(graph.parameters[name].shape) for name in segment.parameters)
        own = None if times is None else times.segments[segment.index]
        forward_s, backward_s = (None, None) if own is None else (own.forward_s, own.backward_s)
        found.append(SegmentRecord(segment.name, count, forward_s, backward_s))
    return tuple(found)


def _memory(rank: RankMemory) -> RankRecord:
    stages = rank.stages
    return RankRecord(
        peak_bytes=rank.peak.total_bytes,
        parameters=sum(own.parameters for own in stages),
        gradients=sum(own.gradients for own in stages),
        optimizer=sum(own.optimizer for own in stages),
        activations=sum(own.activations for own in stages),
    )


def _options(options: EngineOptions) -> dict[str, str]:
    """Options of the layout that are not at their defaults."""
    found = {}
    for own in fields(ParallelOptions):
        value = getattr(options, own.name)
        if value != own.default and value is not None:
            found[own.name] = str(value)[:_LONGEST]
    return found
