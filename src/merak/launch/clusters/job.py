"""A job for a cluster: the script, its ranks, and the torchrun command of one node."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from merak.core.errors import CommandError

RECIPES = (".yaml", ".yml")
"""Suffixes of scripts that are recipes of `merak train`."""

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,50}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class ClusterJob:
    """Job that a cluster starts.

    Args:
        script: a Python script, or a recipe of `merak train`.
        arguments: of the script.
        name: of the job, as Kubernetes takes it; None for that of the script.
        nodes: number of nodes.
        devices_per_node: ranks of a node, one for each device.
        device: "cuda", or "cpu" for ranks without a GPU.
        max_restarts: how often torchrun starts all ranks again after a fault.
    """

    script: str
    arguments: tuple[str, ...] = ()
    name: str | None = None
    nodes: int = 1
    devices_per_node: int = 1
    device: str = "cuda"
    max_restarts: int = 0

    def __post_init__(self) -> None:
        suffix = Path(self.script).suffix
        if suffix not in (".py", *RECIPES):
            raise CommandError(
                f"{self.script} is no script that can be launched; give a .py file or a recipe "
                "(.yaml)."
            )
        for flag, value, least in (
            ("--nodes", self.nodes, 1),
            ("--devices-per-node", self.devices_per_node, 1),
            ("--max-restarts", self.max_restarts, 0),
        ):
            if value < least:
                raise CommandError(f"{flag} {value} is too few; use {least} or more.")
        if self.device not in ("cuda", "cpu"):
            raise CommandError(f"--device {self.device} is no device; use cuda or cpu.")
        if self.name is not None and not _NAME.fullmatch(self.name):
            raise CommandError(
                f"--name {self.name} is no name that every launcher takes; use up to 52 lower case "
                "letters, digits and dashes."
            )


def job_name(job: ClusterJob) -> str:
    """Return the name of a job: the one given, or that of its script."""
    words = re.sub(r"[^a-z0-9]+", "-", Path(job.script).stem.lower())[:52].strip("-")
    return job.name or words or "merak"


def program(job: ClusterJob) -> list[str]:
    """Return the words after `python` that run the script as one rank.

    A recipe resumes, so that a job that is started again goes on.
    """
    if Path(job.script).suffix not in RECIPES:
        return [job.script, *job.arguments]
    return ["-m", "merak.cli.main", "train", job.script, "--resume", *job.arguments]


def torchrun(job: ClusterJob, nodes: str, endpoint: str | None) -> list[str]:
    """Return the torchrun command of one node.

    Args:
        job: what it runs.
        nodes: number of nodes, or the shell's expression for it.
        endpoint: address and port of the rendezvous; None for a job of one node.
    """
    meeting = ["--standalone"]
    if endpoint is not None:
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
        meeting += ["--rdzv-id", job_name(job)]
    return [
        "torchrun",
        *("--nnodes", nodes),
        *("--nproc-per-node", str(job.devices_per_node)),
        *meeting,
        *(("--max-restarts", str(job.max_restarts)) if job.max_restarts else ()),
        *program(job),
    ]
