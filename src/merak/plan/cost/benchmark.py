"""Benchmark of this machine's device, which takes about a second and is cached on disk."""

from __future__ import annotations

import hashlib
import logging
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch

from merak.core.errors import PlanError
from merak.core.files.private_files import read_cached, write_own_file
from merak.core.random import own_random_state
from merak.graph.cache.cache import warn_unusable
from merak.ops.float8 import OF_VALUES, Scale, has_float8, multiply_scaled
from merak.plan.cost.device import DeviceProfile, from_json, to_json

logger = logging.getLogger(__name__)

_SECONDS_PER_FIGURE = 0.12
_ROUNDS = 7


def measure(device: torch.device | str, cache_dir: Path | None = None) -> DeviceProfile:
    """Measure a device, or read what an earlier call measured on this machine.

    Two measurements differ by a few percent. Ranks that must come to the same plan share one:
    measure on one rank and send the profile to the others.

    Args:
        device: "cpu", or a GPU that torch sees.
        cache_dir: folder for measured profiles; None neither reads nor writes one.

    Returns:
        Speeds with the number of threads that torch uses now.

    Raises:
        PlanError: a device type other than "cpu" and "cuda".
    """
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise PlanError(f"device={str(device)!r} cannot be measured; use 'cpu' or 'cuda'.")
    known = measured_before(device, cache_dir)
    if known is not None:
        return known
    with own_random_state(device):
        profile = _measure(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # gigabytes, which no job needs again in such pieces
    if cache_dir is None:
        return profile
    path = _path(cache_dir, device)
    try:
        write_own_file(path, to_json(profile).encode())
    except OSError as error:
        warn_unusable(cache_dir, error.strerror or str(error))
    else:
        logger.info("Measured %s; cached in %s", profile.name, path)
    return profile


def measured_before(device: torch.device, cache_dir: Path | None) -> DeviceProfile | None:
    """Read what an earlier call of `measure` has measured; None where there is nothing.

    Args:
        device: as of `measure`.
        cache_dir: as of `measure`. A file there that is damaged, or that others may have written,
            is warned of and counts as none.
    """
    if cache_dir is None:
        return None
    path = _path(cache_dir, device)
    return read_cached(
        path, lambda content: from_json(content.decode(), path.name), "profile", logger.warning
    )


def _path(cache_dir: Path, device: torch.device) -> Path:
    return cache_dir / f"profile-{_machine_key(device)}.json"


def _machine_key(device: torch.device) -> str:
    """Cache key of a measurement: device, torch version, threads, and fields of a profile."""
    machine = (device.type, device_name(device), torch.__version__, str(torch.get_num_threads()))
    parts = [
        *machine,
        *DeviceProfile.__slots__,
    ]  # which another version of Merak may have others of
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def device_name(device: torch.device) -> str:
    """The device's model, as its driver or the operating system calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _measure(device: torch.device) -> DeviceProfile:
    on_gpu = device.type == "cuda"
    dtypes = [torch.float32, torch.bfloat16, *([torch.float16] if on_gpu else [])]
    size = 4096 if on_gpu else 512
    rates = {}
    for dtype in dtypes:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        rates[str(dtype).removeprefix("torch.")] = 2.0 * size**3 / seconds_of(device, a.mm, b)
    if on_gpu and has_float8(device):
        unscaled = Scale(*torch.ones(2, device=device).unbind())
        a, b = (torch.randn(size, size, device=device).to(OF_VALUES) for _ in range(2))
        product = partial(multiply_scaled, a, b, unscaled, unscaled, torch.bfloat16)
        rates[str(OF_VALUES).removeprefix("torch.")] = 2.0 * size**3 / seconds_of(device, product)
    large = torch.randn((16 if on_gpu else 1) * 2**24, device=device)
    copy = torch.empty_like(large)
    small = torch.randn(2**22 if on_gpu else 2**14, device=device)
    one = torch.zeros(1, device=device)
    # A GPU copies a fraction: torch never gives pinned memory back.
    part = large[: large.numel() // (8 if on_gpu else 1)]
    overhead_s = seconds_of(device, one.add, 1.0)
    function_s = seconds_of(device, torch.nn.functional.gelu, small)
    random_s = seconds_of(device, small.bernoulli_, 0.9)
    return DeviceProfile(
        name=device_name(device),
        device_type=device.type,
        flops_per_s=MappingProxyType(rates),
        memory_bytes_per_s=2 * large.nbytes / seconds_of(device, copy.copy_, large),
        functions_per_s=small.numel() / max(function_s - overhead_s, overhead_s),
        randoms_per_s=small.numel() / max(random_s - overhead_s, overhead_s),
        overhead_s=overhead_s,
        host_bytes_per_s=part.nbytes / seconds_of(device, _both_ways(part, copy[: len(part)])),
        memory_bytes=torch.cuda.get_device_properties(device).total_memory if on_gpu else None,
    )


def _both_ways(large: torch.Tensor, copy: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Function that copies a tensor to pinned host memory, and as much back at the same time."""
    on_gpu = large.device.type == "cuda"
    out, back = (torch.empty(large.shape, pin_memory=on_gpu) for _ in range(2))
    if not on_gpu:
        return lambda: back.copy_(large)
    streams = [torch.cuda.Stream(large.device) for _ in range(2)]

    def both() -> torch.Tensor:
        for stream, target, source in zip(streams, (out, copy), (large, back), strict=True):
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
        return out

    return both


def seconds_of(
    device: torch.device, work: Callable[..., torch.Tensor], *args: torch.Tensor | float
) -> float:
    """Seconds of one call: the best of several rounds of calls, for others share the machine."""
    calls = max(1, round(_SECONDS_PER_FIGURE / _ROUNDS / max(_round(device, work, args, 3), 1e-7)))
    return min(_round(device, work, args, calls) for _ in range(_ROUNDS))


def _round(
    device: torch.device,
    work: Callable[..., torch.Tensor],
    args: tuple[torch.Tensor | float, ...],
    calls: int,
) -> float:
    with torch.no_grad():
        work(*args)
        _finish(device)
        start = time.perf_counter()
        for _ in range(calls):
            work(*args)
        _finish(device)
    return (time.perf_counter() - start) / calls


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
