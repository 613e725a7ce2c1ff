"""Device profiles: speeds, measured (see `merak.plan.cost.benchmark`) or from a data sheet."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType

import torch

from merak.core.errors import PlanError
from merak.core.files.json_file import UnreadableFile, parse_json
from merak.plan.cost.calibration import Calibration
from merak.plan.cost.data_sheets import ALIASES, GENERATIONS, LINKS, SHEETS, DataSheet
from merak.plan.cost.efficiency import Efficiency, efficiency_from


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
        memory_bytes: of the device's own memory; None where it is not known.
        efficiency: achieved fractions by operator and size; None where every operator runs at the
            rates above, however small it is.
        multiprocessors: of a device with an `efficiency`; 0 where their number does not matter.
        calibration: measured figures that correct estimates; None where nothing was measured.
        communicator_bytes: memory of a communicator of all ranks, as measured or as the link has
            it; None for that of GPUs with NVLink.
        tensor_bytes: that tensors may fill; None for what is left of `memory_bytes`.
    """

    name: str
    device_type: str
    flops_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    functions_per_s: float
    randoms_per_s: float
    overhead_s: float
    host_bytes_per_s: float
    memory_bytes: int | None = None
    efficiency: Efficiency | None = None
    multiprocessors: int = 0
    calibration: Calibration | None = None
    communicator_bytes: int | None = None
    tensor_bytes: int | None = None

    def flop_rate(self, dtype: torch.dtype) -> float:
        """FLOPs per second of matrix products of an element type; float32's where it is unknown."""
        return self.flops_per_s.get(_dtype_name(dtype), self.flops_per_s["float32"])

    def peak_rate(self, dtype: torch.dtype) -> float:
        """FLOPs per second that MFU is a fraction of: the data sheet's, or as measured."""
        achieved = 1.0 if self.efficiency is None else self.efficiency.product
        return self.flop_rate(dtype) / achieved

    def slowed(self, factor: float, update_factor: float) -> DeviceProfile:
        """The profile of a device that takes so many times as long.

        Args:
            factor: of the seconds of segments.
            update_factor: of the seconds of the optimizer's step.
        """
        rates = {name: rate / factor for name, rate in self.flops_per_s.items()}
        curve = self.efficiency
        if curve is not None:
            curve = replace(
                curve, launch_s=curve.launch_s * factor, kernel_s=curve.kernel_s * factor
            )
        return replace(
            self,
            efficiency=curve,
            flops_per_s=MappingProxyType(rates),
            memory_bytes_per_s=self.memory_bytes_per_s / factor,
            functions_per_s=self.functions_per_s / factor,
            randoms_per_s=self.randoms_per_s / factor,
            overhead_s=self.overhead_s * factor,
            calibration=(self.calibration or Calibration()).slowed(factor, update_factor),
        )


def to_json(profile: DeviceProfile) -> str:
    """A profile as one JSON object, without its calibration."""
    fields = {name: getattr(profile, name) for name in _SAVED}
    fields["flops_per_s"] = dict(profile.flops_per_s)
    if profile.efficiency is not None:
        fields["efficiency"] = asdict(profile.efficiency)
    return json.dumps(fields, indent=2)


def from_json(text: str, where: str) -> DeviceProfile:
    """A profile from `to_json`'s text.

    Args:
        text: one JSON object.
        where: what to call it in messages, such as the file's path.

    Raises:
        PlanError: it is no JSON, a field is missing or unknown, or a rate is not above 0.
    """
    try:
        fields = parse_json(text, finite=False)
    except UnreadableFile as error:
        raise PlanError(f"{where} {error}; give a profile's file.") from error
    wanted = set(_SAVED)
    if isinstance(fields, dict):
        fields = {"communicator_bytes": None, **fields}  # which former versions have not saved
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
    memory, units, curve, buffers = (fields[name] for name in _OPTIONAL)
    for name, own in (("memory_bytes", memory), ("communicator_bytes", buffers)):
        if own is not None and (not isinstance(own, int) or own <= 0):
            raise PlanError(f"{where}: {name}={own} is no size; give bytes, or null.")
    if not isinstance(units, int) or units < 0:
        raise PlanError(f"{where}: multiprocessors={units} is no number; give 0 or more.")
    if curve is not None and not isinstance(curve, dict):
        raise PlanError(f"{where}: efficiency={curve} is no object; give one, or null.")
    try:
        efficiency = None if curve is None else efficiency_from(curve)
    except ValueError as error:
        raise PlanError(f"{where}: {error}; write what `merak.plan.preset` has.") from error
    read = {"flops_per_s": MappingProxyType(dict(rates)), "efficiency": efficiency}
    return DeviceProfile(**{**fields, **read})


_NOT_SAVED = ("calibration", "tensor_bytes")
_SAVED = tuple(name for name in DeviceProfile.__slots__ if name not in _NOT_SAVED)
_OPTIONAL = ("memory_bytes", "multiprocessors", "efficiency", "communicator_bytes")


def preset(name: str) -> DeviceProfile:
    """The profile of a common GPU, from its maker's data sheet.

    Data sheets give peaks. The profile holds the fractions of them that operators achieve, by the
    data sheet's `Efficiency`, and the rest of that curve by operator and size.

    Args:
        name: one of `PRESETS`, or another name of one (`ALIASES`), in any case.

    Raises:
        PlanError: no preset has this name.
    """
    known = sheet_name(name)
    if known is None:
        raise PlanError(f"There is no device {name!r}; choose one of: {', '.join(PRESETS)}.")
    sheet = PRESETS[known]
    return of_sheet(
        known,
        sheet.teraflops,
        sheet.generation,
        memory_bytes=int(sheet.memory_gibibytes * 2**30),
        memory_gigabytes_per_s=sheet.memory_gigabytes_per_s,
        host_gigabytes_per_s=sheet.host_gigabytes_per_s,
        multiprocessors=sheet.multiprocessors,
        communicator_bytes=LINKS[sheet.link].communicator_bytes,
    )


def of_sheet(
    name: str,
    teraflops: Mapping[str, float],
    generation: str,
    *,
    memory_bytes: int,
    memory_gigabytes_per_s: float,
    host_gigabytes_per_s: float,
    multiprocessors: int,
    communicator_bytes: int | None = None,
) -> DeviceProfile:
    """The profile of a GPU from peaks, with what operators of its generation achieve of them.

    Args:
        name: the device, for people to read.
        teraflops: of dense matrix products by element type, "float32" among them.
        generation: one of `GENERATIONS`.
        memory_bytes: that programs may allocate.
        memory_gigabytes_per_s: of that memory.
        host_gigabytes_per_s: of the link to the host, in one direction.
        multiprocessors: that compute tiles of a product; 0 where their number does not matter.
        communicator_bytes: as of `DeviceProfile`.
    """
    curve = GENERATIONS[generation]
    functions_per_s = teraflops["float32"] * 1e12 * curve.function / _FLOPS_PER_FUNCTION
    rates = {dtype: tera * 1e12 * curve.product for dtype, tera in teraflops.items()}
    return DeviceProfile(
        name=name,
        device_type="cuda",
        flops_per_s=MappingProxyType(rates),
        memory_bytes_per_s=memory_gigabytes_per_s * 1e9 * curve.copy,
        functions_per_s=functions_per_s,
        randoms_per_s=functions_per_s,
        overhead_s=curve.kernel_s,
        host_bytes_per_s=host_gigabytes_per_s * 1e9 * curve.host,
        memory_bytes=memory_bytes,
        efficiency=curve,
        multiprocessors=multiprocessors,
        communicator_bytes=communicator_bytes,
    )


def sheet_name(name: str) -> str | None:
    """The name among `PRESETS` of a device as people or drivers name it; None for no data sheet."""
    words = re.findall(r"[a-z0-9]+", re.sub(r"(\d+) ?-?gi?b", r"\1gb", name.lower()))
    words = [word for word in words if word not in _MAKERS]
    sizes = [word for word in words if word.endswith("gb") and word[:-2].isdecimal()]
    others = [word for word in words if word not in sizes]
    plain = [word for word in others if not _FORM.fullmatch(word)]
    for own in (words, [*plain[:1], *sizes, *plain[1:]], plain):
        known = ALIASES.get("-".join(own), "-".join(own))
        if known in PRESETS and all(_has_memory(PRESETS[known], int(s[:-2])) for s in sizes):
            return known
    return None


_MAKERS = frozenset(("nvidia", "amd", "geforce", "instinct", "tesla", "quadro"))
_FORM = re.compile(r"sxm\d?|hbm\d?e?")
"""Words of a driver's name that say nothing beside the memory."""


def _has_memory(sheet: DataSheet, gigabytes: int) -> bool:
    """Whether a device has a memory that its maker calls so many gigabytes."""
    return 0.88 * gigabytes <= sheet.memory_gibibytes <= 1.02 * gigabytes


PRESETS = SHEETS
"""Data sheets by name."""

_FLOPS_PER_FUNCTION = 30.0


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
