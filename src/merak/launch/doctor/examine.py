"""Examination of this host, and of ranks that exchange tensors, as `merak doctor` shows it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from merak.core.doctor.checks import host_findings
from merak.core.doctor.finding import Finding, Level, System
from merak.core.doctor.variables import PLACE
from merak.core.errors import CommandError, MerakError, RunError, TerminatedError
from merak.core.health import failure
from merak.launch.doctor.on_ranks import Examination, examine_ranks
from merak.launch.ranks import Work, run_ranks

LOCAL_RANKS = 2
"""Ranks that are started where there is no GPU."""

RANKS = "ranks"


def is_rank() -> bool:
    """Whether this process is a rank of a job: RANK alone may be left from another one."""
    return all(os.environ.get(name) for name in ("RANK", *PLACE))


def examine(
    wanted: Examination,
    num_ranks: int | None,
    system: System,
    report: Callable[[Sequence[Finding]], None],
) -> list[Finding] | None:
    """Run every check, on new ranks of this host unless this process is already one of a job.

    Args:
        wanted: device, backend and time limit of the ranks.
        num_ranks: how many to start; None for one on each GPU, or for `LOCAL_RANKS` on the CPU.
        system: where the state of this host is read.
        report: shows what was found where ranks of a job wait in vain, and this process is ended.

    Returns:
        What was found; None on a rank that leaves the report to another one.

    Raises:
        CommandError: a number of ranks that makes no sense, or that the job already has.
        TerminatedError: SIGTERM has ended the ranks.
    """
    if is_rank():
        if num_ranks is not None:
            raise CommandError(
                f"torchrun has started the ranks already; leave out --ranks {num_ranks}."
            )
        return _joined(wanted, system, report)
    number = default_ranks(wanted.device) if num_ranks is None else num_ranks
    if number < 1:
        raise CommandError(f"--ranks {number} is no number of ranks; use 1 or more.")
    found = host_findings(system)  # before the variables of other jobs are dropped
    for name in ("RANK", "LOCAL_RANK", *PLACE):
        os.environ.pop(name, None)
    return [*found, *_started(wanted, number)]


def default_ranks(device: torch.device) -> int:
    """Return the number of ranks that are started on a device.

    Args:
        device: that ranks compute on.
    """
    return torch.cuda.device_count() if device.type == "cuda" else LOCAL_RANKS


def _started(wanted: Examination, number: int) -> Sequence[Finding]:
    """Findings of new ranks of this host."""
    try:
        return run_ranks(Work(examine_ranks, (wanted, None)), number) or []
    except TerminatedError:
        raise
    except (RunError, MerakError) as error:
        return [_failed(wanted, str(error))]


def _joined(
    wanted: Examination, system: System, report: Callable[[Sequence[Finding]], None]
) -> list[Finding] | None:
    """Findings of the ranks of a job; where they cannot meet, each host's own."""
    own = host_findings(system)

    def report_alone() -> None:
        report([*own, _failed(wanted, f"ranks have not come within {wanted.timeout_s:g} s")])

    try:
        with failure.starting(report_alone):
            return examine_ranks(wanted, own)
    except (MerakError, dist.DistError, RuntimeError) as error:
        failure.started()
        if os.environ.get("LOCAL_RANK", "0") != "0":
            return None
        return [*own, _failed(wanted, str(error))]


def _failed(wanted: Examination, reason: str) -> Finding:
    """The finding that ranks could not exchange tensors."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    # Of a traceback, who has failed and with what: its first line and its last one.
    shown = (
        lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}" if lines else "without a word"
    )
    fix = "look first at the other problems and warnings of this list"
    if wanted.device.type == "cuda" and wanted.backend != "gloo":
        fix += "; --backend gloo shows whether NCCL is the cause, NCCL_DEBUG=INFO what it does"
    return Finding(RANKS, Level.PROBLEM, shown.rstrip("."), fix)
