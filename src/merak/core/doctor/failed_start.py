"""Advice below the error of a job that has failed to start: what is wrong on this host."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from merak.core.doctor.checks import CHECKS
from merak.core.doctor.finding import Check, Finding, Level, System
from merak.core.health.stderr import write_line

LIMIT_S = 3.0
"""Seconds that the checks may take: nobody is to wait for them long."""

MORE = "run `merak doctor` for all checks"


def advise(system: System | None = None, limit_s: float = LIMIT_S) -> None:
    """Print the problems and warnings of this host to standard error, after the error itself.

    Args:
        system: where its state is read; by default this process and its host.
        limit_s: seconds after which the checks that have not ended are left out.
    """
    found: list[Finding] = []
    quick = [check for check in CHECKS if check.at_failed_start]
    # A thread: a file system or name server that does not answer must not keep the job from ending.
    worker = threading.Thread(
        target=_run, args=(quick, system or System(), found), daemon=True, name="doctor"
    )
    worker.start()
    worker.join(limit_s)
    write_line(advice(list(found)))


def _run(checks: Sequence[Check[object]], system: System, found: list[Finding]) -> None:
    for check in checks:
        found.extend(check.findings(system))


def advice(findings: Sequence[Finding]) -> str:
    """Format what is wrong, in a line each, and how to find out more.

    Args:
        findings: of which those are shown that are not ok.
    """
    lines = [
        f"merak doctor: {finding.level} ({finding.name}): {finding.found}. To do: {finding.fix}."
        for finding in sorted(findings, key=lambda own: own.ok)
        if finding.level is not Level.OK
    ]
    if not lines:
        return f"merak doctor: quick checks of this host find nothing wrong; {MORE}."
    return "\n".join([*lines, f"merak doctor: {MORE}."])
