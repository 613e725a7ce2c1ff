"""What torch's profiler saw of a step: kernels, operators, waits, and kinds of attention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType

LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")

ATTENTION = {
    "flash": "_scaled_dot_product_flash_attention",
    "memory-efficient": "_scaled_dot_product_efficient_attention",
    "cudnn": "_scaled_dot_product_cudnn_attention",
    "overrideable": "_scaled_dot_product_fused_attention_overrideable",
    "math": "_safe_softmax",  # of plain operators, among which this is attention's alone
    "inside documents": "torch_attn::_varlen_attn",
}
"""How torch computes attention, by what its operators' names begin with."""


@dataclass(frozen=True, slots=True)
class Counts:
    """How often something happened in a step.

    Args:
        kernels: kernels that ran on the device, without copies and fills.
        launches: calls that launched one; a graph of them is launched by another.
        copies: copies and fills on the device, from and to the host too.
        waits: times that the host waited for the device.
        operators: ATen operators that the host called, those inside of others too.
    """

    kernels: int
    launches: int
    copies: int
    waits: int
    operators: int


def starting(device: str) -> Any:
    """A profiler that runs."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=activities, acc_events=True)
    profiler.start()
    return profiler


def on_device(event: Any) -> bool:
    return bool(event.device_type == DeviceType.CUDA)


def is_copy(name: str) -> bool:
    return name.startswith(("Memcpy", "Memset"))


def is_range(event: Any) -> bool:
    """Whether an event on the device is a name that somebody gave to a stretch, and no kernel."""
    if getattr(event, "is_user_annotation", False):
        return True
    return str(event.name).startswith(("Optimizer.", "ProfilerStep"))


def kernels_of(profiler: Any) -> list[str]:
    """Names of the kernels that ran, without copies and fills."""
    events = [e for e in profiler.events() if on_device(e) and not is_range(e)]
    return [event.name for event in events if not is_copy(event.name)]


def counted(profiler: Any) -> Counts:
    """Count what a stopped profiler has seen."""
    events = list(profiler.events())
    own = [e.name for e in events if on_device(e) and not is_range(e)]
    host = [e.name for e in events if not on_device(e)]
    return Counts(
        kernels=sum(not is_copy(name) for name in own),
        launches=sum(name in LAUNCHES for name in host),
        copies=sum(map(is_copy, own)),
        waits=sum(name in WAITS for name in host),
        operators=sum(name.startswith("aten::") for name in host),
    )


def busy_s(profiler: Any) -> float:
    """Seconds in which the device computed or copied, of a stopped profiler."""
    events = [e for e in profiler.events() if on_device(e) and not is_range(e)]
    spans = sorted((e.time_range.start, e.time_range.end) for e in events)
    total, until = 0.0, 0.0
    for start, end in spans:
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total / 1e6


def attention_of(profiler: Any) -> str:
    """How attention was computed, forward and backward, and how often."""
    found: Counter[str] = Counter()
    for event in profiler.events():
        if on_device(event):
            continue
        name = event.name.removeprefix("aten::")
        for kind, beginning in ATTENTION.items():
            if name.startswith(beginning):
                found[f"{kind} backward" if "backward" in name else kind] += 1
    return ", ".join(f"{kind} {count}" for kind, count in sorted(found.items())) or "none"


def attention_kernels(names: Iterable[str]) -> str:
    """The kernels whose names speak of attention, shortened."""
    words = ("flash", "fmha", "attention", "sdpa", "softmax")
    found = {name for name in names if any(word in name.lower() for word in words)}
    return "; ".join(sorted({short(name) for name in found})) or "none seen"


def short(kernel: str) -> str:
    """A kernel's name without its arguments and return type."""
    name = kernel.removeprefix("void ").partition("<")[0].partition("(")[0]
    return name[:60]
