"""Device profiles: speeds, measured (see `merak.plan.cost.benchmark`) or from a data sheet."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from merak.core.errors import PlanError


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """Speeds of a device, for the cost of operators. Build with `preset` or `measure`.

    Args:
        name: the device, for people to read.
        device_type: "cpu" or "cuda".
        flops_per_s: rate of a large matrix product, by the name of its element type ("bfloat16").
        memory_bytes_per_s: rate of a large copy, reads and writes together.
        functions_per_s: elements per second of a function such as gelu or exp.
        randoms_per_s: random bits per second, as dropout draws them.
        overhead_s: seconds of an operator on one element.
        host_bytes_per_s: rate of copies to pinned host memory, and of as many back meanwhile.
    """

    name: str
    device_type: str
    flops_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    functions_per_s: float
    randoms_per_s: float
    overhead_s: float
    host_bytes_per_s: float

    def flop_rate(self, dtype: torch.dtype) -> float:
        """FLOPs per second of matrix products of an element type; float32's where it is unknown."""
        return self.flops_per_s.get(_dtype_name(dtype), self.flops_per_s["float32"])


def to_json(profile: DeviceProfile) -> str:
    """A profile as one JSON object."""
    fields = {name: getattr(profile, name) for name in DeviceProfile.__slots__}
    return json.dumps(fields | {"flops_per_s": dict(profile.flops_per_s)}, indent=2)


def from_json(text: str, where: str) -> DeviceProfile:
    """A profile from `to_json`'s text.

    Args:
        text: one JSON object.
        where: what to call it in messages, such as the file's path.

    Raises:
        PlanError: it is no JSON, a field is missing or unknown, or a rate is not above 0.
    """
    try:
        fields: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanError(f"{where} is not JSON ({error}); give a profile's file.") from error
    wanted = set(DeviceProfile.__slots__)
    if not isinstance(fields, dict) or set(fields) != wanted:
        raise PlanError(f"{where} is no device profile; give one object with {sorted(wanted)}.")
    rates = fields["flops_per_s"]
    if not isinstance(rates, dict) or "float32" not in rates:
        raise PlanError(f"{where}: flops_per_s={rates} must map element types, float32 among them.")
    names = ("memory_bytes_per_s", "functions_per_s", "randoms_per_s", "host_bytes_per_s")
    for name in (*names, *rates):
        value = rates.get(name, fields.get(name))
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise PlanError(f"{where}: {name}={value} is no rate; give a number above 0.")
    if not isinstance(fields["overhead_s"], int | float) or not 0 <= fields["overhead_s"] < 1:
        raise PlanError(f"{where}: overhead_s={fields['overhead_s']} is no overhead; give seconds.")
    return DeviceProfile(**{**fields, "flops_per_s": MappingProxyType(dict(rates))})


def preset(name: str) -> DeviceProfile:
    """The profile of a common GPU, from its maker's data sheet.

    Data sheets give peaks. A large matrix product reaches about 0.7 of the peak and a large copy
    about 0.85 of the memory's; copies to the host and back at once reach about 0.7 of the link's.
    The profile holds these fractions.

    Args:
        name: one of `PRESETS`.

    Raises:
        PlanError: no preset has this name.
    """
    if name not in PRESETS:
        raise PlanError(f"There is no device {name!r}; choose one of: {', '.join(PRESETS)}.")
    sheet = PRESETS[name]
    rates = {dtype: tera * 1e12 * _GEMM_FRACTION for dtype, tera in sheet.teraflops.items()}
    functions_per_s = rates["float32"] / _FLOPS_PER_FUNCTION
    return DeviceProfile(
        name=name,
        device_type="cuda",
        flops_per_s=MappingProxyType(rates),
        memory_bytes_per_s=sheet.memory_gigabytes_per_s * 1e9 * _MEMORY_FRACTION,
        functions_per_s=functions_per_s,
        randoms_per_s=functions_per_s,
        overhead_s=_GPU_OVERHEAD_S,
        host_bytes_per_s=sheet.host_gigabytes_per_s * 1e9 * _HOST_FRACTION,
    )


@dataclass(frozen=True, slots=True)
class DataSheet:
    """Peaks of a GPU: dense matrix products, without structured sparsity.

    Args:
        teraflops: by element type, accumulating in float32; float32 without TF32.
        memory_gigabytes_per_s: of the device's own memory.
        host_gigabytes_per_s: of its link to the host, in one direction.
    """

    teraflops: Mapping[str, float]
    memory_gigabytes_per_s: float
    host_gigabytes_per_s: float


_GEMM_FRACTION = 0.7
_MEMORY_FRACTION = 0.85
_HOST_FRACTION = 0.7
_FLOPS_PER_FUNCTION = 30.0
_GPU_OVERHEAD_S = 5e-6


def _sheet(
    half: float, single: float, gigabytes_per_s: float, host: float, *, bf16: bool = True
) -> DataSheet:
    rates = {"float32": single, "float16": half} | ({"bfloat16": half} if bf16 else {})
    return DataSheet(MappingProxyType(rates), gigabytes_per_s, host)


PRESETS: Mapping[str, DataSheet] = MappingProxyType(
    {
        "a10": _sheet(125, 31.2, 600, 32),
        "a100-40gb": _sheet(312, 19.5, 1555, 32),
        "a100-80gb": _sheet(312, 19.5, 2039, 32),
        "b200": _sheet(2250, 75, 7700, 64),
        "h100-pcie": _sheet(756, 51, 2000, 64),
        "h100-sxm": _sheet(989, 67, 3350, 64),
        "h200": _sheet(989, 67, 4800, 64),
        "l4": _sheet(121, 30.3, 300, 32),
        "l40s": _sheet(362, 91.6, 864, 32),
        "mi300x": _sheet(1307, 163.4, 5300, 64),
        "rtx-3090": _sheet(71, 35.6, 936, 32),
        "rtx-4090": _sheet(165, 82.6, 1008, 32),
        "t4": _sheet(65, 8.1, 320, 16, bf16=False),
        "v100": _sheet(125, 15.7, 900, 16, bf16=False),
    }
)
"""Data sheets by name."""


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
