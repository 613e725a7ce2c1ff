"""C++ compiler, headers of Python and Triton, which torch.compile needs."""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from merak.core.doctor.finding import Judgement, System, fine, warning

COMPILERS = ("g++", "clang++", "c++")

USED_BY = "torch.compile in your own code needs it; Merak runs without"


@dataclass(frozen=True, slots=True)
class Toolchain:
    """C++ compiler, Python headers and Triton, which compile code while a job runs.

    Args:
        named: the variable CXX; empty where it is not set.
        path: of the C++ compiler; empty without one.
        headers: folder where Python's headers should be.
        has_headers: whether they are there.
        triton: its version; empty without.
        has_gpus: whether torch can use GPUs.
    """

    named: str
    path: str
    headers: str
    has_headers: bool
    triton: str = ""
    has_gpus: bool = False


def read_toolchain(system: System) -> Toolchain:
    """Look for a compiler, Python's headers and Triton; nothing is run.

    Args:
        system: whose CXX and PATH count.
    """
    named = system.environment.get("CXX", "")
    searched = system.environment.get("PATH")
    names = [named.split()[0]] if named.split() else COMPILERS
    paths = (shutil.which(name, path=searched) for name in names)
    headers = sysconfig.get_paths()["include"]
    return Toolchain(
        named=named,
        path=next((path for path in paths if path), ""),
        headers=headers,
        has_headers=Path(headers, "Python.h").is_file(),
        triton=_triton(),
        has_gpus=torch.cuda.is_available(),
    )


def _triton() -> str:
    for name in ("triton", "pytorch-triton", "triton-rocm", "pytorch-triton-rocm"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def check_compiler(own: Toolchain) -> Iterator[Judgement]:
    """Check that C++ code can be compiled."""
    wrong = 0
    if not own.path:
        wrong += 1
        missing = f"CXX={own.named} is not there" if own.named else "there is no C++ compiler"
        yield warning(
            f"{missing}; {USED_BY}",
            "install g++ (apt-get install g++), or let CXX name a compiler",
        )
    if not own.has_headers:
        wrong += 1
        yield warning(
            f"{own.headers} has no Python.h; {USED_BY}",
            "install Python's headers (apt-get install python3-dev)",
        )
    if not wrong:
        yield fine(own.path)


def check_triton(own: Toolchain) -> Iterator[Judgement]:
    """Check that kernels for GPUs can be compiled."""
    if own.triton:
        yield fine(f"Triton {own.triton}")
    elif own.has_gpus:
        yield warning(f"Triton is not installed; {USED_BY}", "pip install triton")
    else:
        yield fine("not installed, and not needed without a GPU")
