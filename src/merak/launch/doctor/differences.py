"""Differences between the hosts of a job: versions, devices, variables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from merak.core.doctor.finding import Finding, Level, System
from merak.core.doctor.gpus import read_gpus
from merak.core.doctor.software import read_software
from merak.core.doctor.torch_build import read_torch

NAME = "hosts"

PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "OMP_", "MERAK_")
"""Beginnings of the variables that should be equal on all hosts."""

OF_ONE_HOST = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "MERAK_CACHE")
"""Those of them that may differ: interfaces and disks have other names elsewhere."""


@dataclass(frozen=True, slots=True)
class Traits:
    """Versions and settings that should be equal on all hosts of a job, by name.

    Args:
        versions: of packages; ranks that differ may run different code.
        devices: GPUs, driver, NCCL.
        variables: of the environment.
    """

    versions: Mapping[str, str] = field(default_factory=dict)
    devices: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)


def read_traits(system: System) -> Traits:
    """Read the traits of this host and process.

    Args:
        system: where its state is read.
    """
    software, build = read_software(system), read_torch(system)
    kinds = Counter(gpu.name for gpu in read_gpus(system).found)
    versions = {"Merak": software.merak, "Python": software.python, **software.versions}
    return Traits(
        versions={**versions, "torch": build.version},
        devices={
            "GPUs": ", ".join(f"{number} × {kind}" for kind, number in kinds.items()),
            "NVIDIA driver": build.nvidia_driver,
            "NCCL": build.nccl,
        },
        variables={
            name: value
            for name, value in system.environment.items()
            if name.startswith(PREFIXES) and name not in OF_ONE_HOST
        },
    )


def compare_hosts(traits: Mapping[str, Traits]) -> list[Finding]:
    """Compare the hosts of a job.

    Args:
        traits: of each host.
    """
    if len(traits) < 2:
        return []
    found = [
        *_differing({h: own.versions for h, own in traits.items()}, Level.PROBLEM, _SAME_PACKAGES),
        *_differing({h: own.devices for h, own in traits.items()}, Level.WARNING, _SAME_DEVICES),
        *_differing({h: own.variables for h, own in traits.items()}, Level.WARNING, _SAME_VALUES),
    ]
    return found or [Finding(NAME, Level.OK, "the same versions, devices and variables on all")]


_SAME_PACKAGES = "install the same versions on all hosts, for example from one lock file"
_SAME_DEVICES = (
    "take hosts of one kind, or describe them to `merak plan --cluster`, which divides the work"
)
_SAME_VALUES = "set it on all hosts or on none"


def _differing(own: Mapping[str, Mapping[str, str]], level: Level, fix: str) -> list[Finding]:
    names = dict.fromkeys(name for values in own.values() for name in values)
    found = []
    for name in names:
        hosts: dict[str, list[str]] = {}
        for host, values in own.items():
            hosts.setdefault(values.get(name, ""), []).append(host)
        if len(hosts) > 1:
            listed = "; ".join(f"{v or 'none'} on {', '.join(h)}" for v, h in hosts.items())
            found.append(Finding(NAME, level, f"{name} differs: {listed}", fix))
    return found


def merge_hosts(findings: Mapping[str, Sequence[Finding]]) -> list[Finding]:
    """Join what is the same on several hosts.

    Args:
        findings: of each host, each in the order of the checks.

    Returns:
        Findings in the order of the checks, with the hosts that each is of; with none where there
        is only one host.
    """
    hosts: dict[Finding, list[str]] = {}
    for host, own in findings.items():
        for finding in own:
            hosts.setdefault(finding, []).append(host)
    order = {finding.name: place for own in findings.values() for place, finding in enumerate(own)}
    merged = sorted(hosts.items(), key=lambda item: order[item[0].name])
    return [
        Finding(own.name, own.level, own.found, own.fix, "" if len(findings) == 1 else ", ".join(h))
        for own, h in merged
    ]
