"""Speeds of one device by size: matrix products, copies, functions and the optimizer's step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from merak.engine.profile.stopwatch import Stopwatch
from merak.plan.cost.benchmark import measure
from merak.plan.cost.calibration import Curve, curve_of
from merak.plan.cost.device import DeviceProfile

_GPU_SIDES, _CPU_SIDES = (256, 1024, 2048, 4096, 8192), (32, 64, 128, 256, 512)
_GPU_BYTES, _CPU_BYTES = (2**20, 2**24, 2**28, 2**30), (2**14, 2**18, 2**22, 2**25)
_GPU_ELEMENTS, _CPU_ELEMENTS = (2**16, 2**20, 2**26), (2**10, 2**14, 2**20)
_GPU_UPDATED, _CPU_UPDATED = (2**20, 2**24, 2**28), (2**14, 2**18, 2**22)
_TENSORS = 16
"""Tensors of parameters that an optimizer's step is measured with."""


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """Measured speeds of a device.

    Args:
        speeds: of large work.
        products: seconds of square matrix products by FLOPs, by element type.
        copies: seconds of copies by bytes read and written.
        functions: seconds of gelu by elements.
        updates: seconds of an AdamW step by bytes of float32 parameters.
    """

    speeds: DeviceProfile
    products: tuple[tuple[str, Curve], ...]
    copies: Curve
    functions: Curve
    updates: Curve


def measure_device(watch: Stopwatch) -> DeviceSpeed:
    """Measure the device of a stopwatch."""
    device = watch.device
    on_gpu = device.type == "cuda"
    speeds = measure(device)
    if on_gpu:
        memory = torch.cuda.get_device_properties(device).total_memory
        speeds = replace(speeds, memory_bytes=memory)
    with torch.no_grad():
        products = tuple(
            (name, _products(watch, getattr(torch, name), _GPU_SIDES if on_gpu else _CPU_SIDES))
            for name in speeds.flops_per_s
        )
        copies = [_copy(watch, size) for size in (_GPU_BYTES if on_gpu else _CPU_BYTES)]
        functions = [
            _function(watch, count) for count in (_GPU_ELEMENTS if on_gpu else _CPU_ELEMENTS)
        ]
    updates = [_update(watch, size) for size in (_GPU_UPDATED if on_gpu else _CPU_UPDATED)]
    return DeviceSpeed(speeds, products, curve_of(copies), curve_of(functions), curve_of(updates))


def _products(watch: Stopwatch, dtype: torch.dtype, sides: tuple[int, ...]) -> Curve:
    points = []
    for side in sides:
        a, b = (torch.randn(side, side, device=watch.device).to(dtype) for _ in range(2))
        points.append((2.0 * side**3, watch.seconds(lambda a=a, b=b: a.mm(b))))  # type: ignore[misc]
    return curve_of(points)


def _copy(watch: Stopwatch, num_bytes: int) -> tuple[float, float]:
    source = torch.zeros(num_bytes // 8, device=watch.device)
    target = torch.empty_like(source)
    return float(num_bytes), watch.seconds(lambda: target.copy_(source))


def _function(watch: Stopwatch, count: int) -> tuple[float, float]:
    numbers = torch.randn(count, device=watch.device)
    return float(count), watch.seconds(lambda: torch.nn.functional.gelu(numbers))


def _update(watch: Stopwatch, num_bytes: int) -> tuple[float, float]:
    """Seconds of a step of AdamW with parameters of so many bytes."""
    shape = (num_bytes // 4 // _TENSORS,)
    parameters = [
        torch.nn.Parameter(torch.zeros(shape, device=watch.device)) for _ in range(_TENSORS)
    ]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=1e-6)
    return float(num_bytes), watch.seconds(optimizer.step)
