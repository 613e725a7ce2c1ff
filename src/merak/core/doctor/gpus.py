"""GPUs of the host: their kinds, and the memory that other processes hold."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from merak.core.doctor.finding import Judgement, System, fine, problem, warning
from merak.core.units import size

QUERY_S = 5
"""Seconds that the driver's tool may take to answer."""

USED_BYTES = 10**9
"""Memory in use on a GPU above which it is taken for that of another process; a desktop and the
driver itself take less."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that this process may use.

    Args:
        name: of its kind.
        total_bytes: of its memory.
        used_bytes: of its memory, by all processes.
        capability: compute capability, such as "9.0"; empty if unknown.
    """

    name: str
    total_bytes: int
    used_bytes: int
    capability: str = ""


@dataclass(frozen=True, slots=True)
class Gpus:
    """GPUs of the host.

    Args:
        found: in the order of their numbers.
        architectures: that torch has kernels for ("sm_90", "compute_90"); empty if unknown.
    """

    found: tuple[Gpu, ...]
    architectures: tuple[str, ...] = ()


def read_gpus(system: System) -> Gpus:
    """Read GPUs with the driver's tool, which takes none of their memory; else with torch.

    Args:
        system: whose CUDA_VISIBLE_DEVICES says which GPUs count.
    """
    architectures = tuple(torch.cuda.get_arch_list()) if torch.version.hip is None else ()
    visible = system.environment.get("CUDA_VISIBLE_DEVICES")
    if torch.version.hip is None and shutil.which("nvidia-smi"):
        return Gpus(listed_gpus(_query(), visible), architectures)
    if not torch.cuda.is_available():
        return Gpus(())
    return Gpus(tuple(map(_by_torch, range(torch.cuda.device_count()))), architectures)


def _query() -> str:
    fields = "index,uuid,name,memory.total,memory.used,compute_cap"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_S, check=False)
    return answer.stdout if answer.returncode == 0 else ""


def listed_gpus(table: str, visible: str | None) -> tuple[Gpu, ...]:
    """Read the table that nvidia-smi prints.

    Args:
        table: a line for each GPU: number, identity, name, MiB of memory and of used memory,
            compute capability.
        visible: CUDA_VISIBLE_DEVICES; None where it is not set.
    """
    wanted = None if visible is None else [part.strip() for part in visible.split(",")]
    found = []
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 6 or not (cells[3].isdecimal() and cells[4].isdecimal()):
            continue  # a GPU that reports an error, or no memory of its own
        number, identity, name, total, used, capability = cells
        if wanted is None or number in wanted or any(w and identity.startswith(w) for w in wanted):
            found.append(Gpu(name, int(total) * 2**20, int(used) * 2**20, capability))
    return tuple(found)


def _by_torch(number: int) -> Gpu:
    free, total = torch.cuda.mem_get_info(number)
    return Gpu(torch.cuda.get_device_name(number), total, total - free)


def check_gpus(gpus: Gpus) -> Iterator[Judgement]:
    """Check that GPUs are of one kind, that torch has kernels for them, and that they are free."""
    if not gpus.found:
        yield fine("no GPU")
        return
    kinds = Counter(f"{gpu.name} ({size(gpu.total_bytes)})" for gpu in gpus.found)
    listed = ", ".join(f"{number} × {kind}" for kind, number in kinds.items())
    judged = [*_kinds(kinds, listed), *_kernels(gpus), *_memory(gpus)]
    yield from judged or [fine(listed)]


def _kinds(kinds: Counter[str], listed: str) -> Iterator[Judgement]:
    if len(kinds) > 1:
        yield warning(
            f"GPUs of different kinds: {listed}; in a step all of them wait for the slowest",
            "choose GPUs of one kind with CUDA_VISIBLE_DEVICES",
        )


def _kernels(gpus: Gpus) -> Iterator[Judgement]:
    if not gpus.architectures:
        return
    for name, capability in sorted({(g.name, g.capability) for g in gpus.found if g.capability}):
        if not _has_kernels(capability, gpus.architectures):
            yield problem(
                f"torch has no kernels for {name} (compute capability {capability}; it has "
                f"{', '.join(gpus.architectures)})",
                "install a build of torch that names this GPU, or build torch from its sources",
            )


def _has_kernels(capability: str, architectures: tuple[str, ...]) -> bool:
    """Whether a GPU runs any of the kernels.

    Kernels of an architecture run on later minor versions of the same major one; the intermediate
    code ("compute_…") on all later ones. Source: CUDA C++ Programming Guide, binary compatibility.
    """
    major, minor = (int(part) for part in capability.split("."))
    for own in architectures:
        kind, _, digits = own.partition("_")
        digits = digits.rstrip("af")
        if not digits.isdecimal():
            continue
        built = (int(digits[:-1]), int(digits[-1]))
        if kind == "sm" and built[0] == major and built[1] <= minor:
            return True
        if kind == "compute" and built <= (major, minor):
            return True
    return False


def _memory(gpus: Gpus) -> Iterator[Judgement]:
    for number, gpu in enumerate(gpus.found):
        if gpu.used_bytes < USED_BYTES:
            continue
        found = (
            f"{size(gpu.used_bytes)} of the {size(gpu.total_bytes)} of GPU {number} are in use "
            "by other processes"
        )
        fix = "see nvidia-smi for the processes, and end them or choose other GPUs"
        judge = problem if 2 * gpu.used_bytes > gpu.total_bytes else warning
        yield judge(found, fix)
