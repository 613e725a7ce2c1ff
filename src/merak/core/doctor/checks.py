"""Table of the checks of one host."""

from __future__ import annotations

from typing import Any

from merak.core.doctor import (
    compiler,
    cpus,
    folders,
    gpus,
    limits,
    memory,
    network,
    software,
    torch_build,
    variables,
)
from merak.core.doctor.finding import Check, Finding, System

CHECKS: tuple[Check[Any], ...] = (
    Check("python", software.read_software, software.check_python),
    Check("packages", software.read_software, software.check_packages),
    Check("torch", torch_build.read_torch, torch_build.check_torch),
    Check("backends", torch_build.read_torch, torch_build.check_backends),
    # A job's own ranks hold memory of GPUs, and the driver's tool may take seconds.
    Check("gpus", gpus.read_gpus, gpus.check_gpus, at_failed_start=False),
    Check("host name", network.read_host_name, network.check_host_name),
    Check("interfaces", network.read_interfaces, network.check_interfaces),
    Check("rendezvous", network.read_rendezvous, network.check_rendezvous),
    Check("shared memory", limits.read_shared_memory, limits.check_shared_memory),
    Check("open files", limits.read_limits, limits.check_open_files),
    Check("processes", limits.read_limits, limits.check_processes),
    Check("locked memory", limits.read_limits, limits.check_locked_memory),
    Check("memory", memory.read_memory, memory.check_memory),
    Check("overcommit", memory.read_overcommit, memory.check_overcommit),
    Check("processors", cpus.read_processors, cpus.check_processors),
    Check("compiler", compiler.read_toolchain, compiler.check_compiler, at_failed_start=False),
    Check("triton", compiler.read_toolchain, compiler.check_triton, at_failed_start=False),
    Check("folders", folders.read_folders, folders.check_folders),
    Check("variables", variables.read_variables, variables.check_variables),
)
"""Every check of one host, in the order in which it is shown."""


def host_findings(system: System) -> list[Finding]:
    """Run every check of this host.

    Args:
        system: where its state is read.
    """
    return [finding for check in CHECKS for finding in check.findings(system)]
