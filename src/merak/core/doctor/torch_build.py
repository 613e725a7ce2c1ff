"""The build of torch against the GPUs and drivers of the host, and the backends that it has."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from merak.core.doctor.finding import Judgement, System, fine, problem
from merak.core.units import counted

INSTALL = "https://pytorch.org/get-started/locally"

GPU_MAKERS = {"cuda": "NVIDIA", "rocm": "AMD"}


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """Platform and libraries that torch is built for, and GPUs that the host has.

    Args:
        version: of torch.
        platform: "cuda", "rocm" or "cpu".
        platform_version: of CUDA or ROCm; empty for "cpu".
        num_usable: GPUs that torch can use.
        reason: torch's own words where it can use none; empty where it gives none.
        backends: of process groups that it has.
        nccl: version of NCCL; empty without.
        nvidia_gpus: device files of NVIDIA GPUs.
        nvidia_driver: version of the NVIDIA driver of the kernel; empty without.
        amd_gpus: AMD GPUs that the kernel knows.
        hidden: variable that hides all GPUs, as it is set; empty for none.
    """

    version: str
    platform: str = "cpu"
    platform_version: str = ""
    num_usable: int = 0
    reason: str = ""
    backends: tuple[str, ...] = ("gloo",)
    nccl: str = ""
    nvidia_gpus: int = 0
    nvidia_driver: str = ""
    amd_gpus: int = 0
    hidden: str = ""

    @property
    def gpus(self) -> dict[str, int]:
        """Number of GPUs of the host by the platform that uses them, for those that it has."""
        found = {"cuda": self.nvidia_gpus, "rocm": self.amd_gpus}
        return {platform: number for platform, number in found.items() if number}


def read_torch(system: System) -> TorchBuild:
    """Read what torch is built for, and which GPUs and drivers the kernel knows.

    Args:
        system: where device files are.
    """
    cuda, hip = torch.version.cuda, torch.version.hip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        num_usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return TorchBuild(
        version=torch.__version__,
        platform="rocm" if hip else "cuda" if cuda else "cpu",
        platform_version=hip or cuda or "",
        num_usable=num_usable,
        reason=" ".join(str(caught[0].message).split()) if caught and not num_usable else "",
        backends=_backends(),
        nccl=_nccl() if num_usable else "",
        nvidia_gpus=len(list(system.root.glob("dev/nvidia[0-9]*"))),
        nvidia_driver=_nvidia_driver(system.text("proc/driver/nvidia/version")),
        amd_gpus=_amd_gpus(system),
        hidden=_hidden(system),
    )


def _backends() -> tuple[str, ...]:
    if not dist.is_available():
        return ()
    there = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    return tuple(name for name, is_there in there.items() if is_there)


def _nccl() -> str:
    if "nccl" not in _backends():
        return ""
    return ".".join(map(str, torch.cuda.nccl.version()))


def _nvidia_driver(text: str) -> str:
    """The version in the driver's own description, whose first line has it after "Module"."""
    _, found, rest = text.partition("Kernel Module")
    numbers = [word for word in rest.split() if word[:1].isdecimal() and "." in word]
    return numbers[0] if found and numbers else ""


def _amd_gpus(system: System) -> int:
    """Nodes of the kernel's compute topology that are GPUs; processors have the id 0."""
    nodes = system.root.glob("sys/class/kfd/kfd/topology/nodes/*/gpu_id")
    return sum(system.text(str(node.relative_to(system.root))) not in ("", "0") for node in nodes)


def _hidden(system: System) -> str:
    """The variable that leaves torch no GPU, as it is set."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        value = system.environment.get(name)
        if value is not None and value.strip() in ("", "-1"):
            return f"{name}={value!r}"
    return ""


def check_torch(build: TorchBuild) -> Iterator[Judgement]:
    """Check that torch can use the GPUs of the host."""
    built = f"torch {build.version}"
    if build.platform != "cpu":
        built += f" for {build.platform.upper().replace('ROCM', 'ROCm')} {build.platform_version}"
    there = [
        f"{counted(number, f'{GPU_MAKERS[platform]} GPU')}"
        for platform, number in build.gpus.items()
    ]
    if build.num_usable:
        nccl = f", NCCL {build.nccl}" if build.nccl else ""
        driver = f", driver {build.nvidia_driver}" if build.nvidia_driver else ""
        yield fine(f"{built} uses {counted(build.num_usable, 'GPU')}{driver}{nccl}")
    elif not there:
        yield _without_gpus(build, built)
    elif build.hidden:
        yield problem(
            f"{build.hidden} hides the {' and '.join(there)} of this host from torch",
            f"unset {build.hidden.partition('=')[0]}, or give the numbers of GPUs such as 0,1; to "
            "train on the CPU, give --device cpu or merak.init(device='cpu')",
        )
    elif build.platform not in build.gpus:
        wanted = next(iter(build.gpus)).upper().replace("ROCM", "ROCm")
        kind = "a CPU build" if build.platform == "cpu" else f"a build for {build.platform}"
        yield problem(
            f"torch {build.version} is {kind}, but the host has {' and '.join(there)}",
            f"install torch for {wanted}: {INSTALL}",
        )
    else:
        yield _unusable(build, built, " and ".join(there))


def _without_gpus(build: TorchBuild, built: str) -> Judgement:
    if not build.nvidia_driver:
        return fine(f"{built}; the host has no GPU, so ranks compute on the CPU")
    return problem(
        f"the NVIDIA driver {build.nvidia_driver} is loaded, but no GPU is visible here: a "
        "container was started without them",
        "start the container with GPUs (docker run --gpus all; in Kubernetes, "
        "resources.limits nvidia.com/gpu)",
    )


def _unusable(build: TorchBuild, built: str, there: str) -> Judgement:
    reason = f" ({build.reason})" if build.reason else ""
    if "driver" in build.reason and "old" in build.reason:
        return problem(
            f"{built} needs a newer driver than {build.nvidia_driver or 'the one here'}{reason}",
            f"update the driver of the host, or install torch for an older CUDA: {INSTALL}",
        )
    return problem(
        f"{built} can use none of the {there}{reason}",
        "see whether nvidia-smi (rocm-smi) lists them; if it does not, the driver does not run, or "
        "the container has no access to it",
    )


def check_backends(build: TorchBuild) -> Iterator[Judgement]:
    """Check that torch has the backends with which ranks exchange tensors."""
    if not build.backends:
        yield problem(
            f"torch {build.version} is built without torch.distributed, so there are no ranks",
            f"install a build of torch for Linux: {INSTALL}",
        )
    elif "gloo" not in build.backends:
        yield problem(
            f"torch {build.version} is built without gloo, which ranks need on the CPU",
            f"install torch from {INSTALL}",
        )
    elif build.num_usable and "nccl" not in build.backends:
        yield problem(
            f"torch {build.version} is built without NCCL, which carries tensors between GPUs",
            f"install torch from {INSTALL}; with --backend gloo tensors go over the CPU",
        )
    else:
        yield fine(" and ".join(build.backends))
