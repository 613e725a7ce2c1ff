"""`merak doctor`: what is wrong on this host and between ranks, and what to do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass

import typer

from merak.cli.options import backend, device, json_output, option, takes
from merak.cli.output import show, stdout_to_stderr
from merak.core.doctor.finding import Finding, Level, System
from merak.core.errors import CommandError
from merak.core.units import counted


@dataclass(frozen=True, kw_only=True)
class DoctorRequest:
    """Request to check this host, and ranks on it."""

    ranks: int | None = option(
        None, "--ranks", "N", "Ranks to start here; one for each GPU, or 2 on the CPU."
    )
    timeout: float = option(60.0, "--timeout", "S", "Seconds that ranks wait for one another.")
    backend: str | None = backend()
    device: str | None = device()
    as_json: bool = json_output()


@dataclass(frozen=True, slots=True)
class CheckRow:
    """Row of the doctor's table: one check of a host and its finding.

    Args:
        name: of the check.
        ok: whether a job can run with it; true for warnings.
        level: "ok", "warning" or "problem".
        found: what was found.
        fix: what to do; empty where nothing is to be done.
        host: that it is of; empty where there is one only, or where it is about all ranks.
    """

    name: str
    ok: bool
    level: str
    found: str
    fix: str
    host: str


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """Report of all checks.

    Args:
        checks: in the order in which they are shown.
    """

    checks: tuple[CheckRow, ...]


@takes(DoctorRequest)
def doctor(request: DoctorRequest) -> None:
    """Check this host and its ranks: what is wrong, and what to do."""
    stdout = sys.stdout

    def report(found: Sequence[Finding]) -> None:
        with redirect_stdout(stdout):
            show(DoctorReport(tuple(map(_row, found))), _page, request.as_json)
            stdout.flush()

    with stdout_to_stderr():
        found = _examine(request, report)
    if found is None:
        return
    report(found)
    if not all(one.ok for one in found):
        raise typer.Exit(1)


def _examine(
    request: DoctorRequest, report: Callable[[Sequence[Finding]], None]
) -> Sequence[Finding] | None:
    from merak.arguments import default_trace_cache
    from merak.launch.devices import check_backend, device_of
    from merak.launch.doctor.examine import examine
    from merak.launch.doctor.on_ranks import Examination

    if not 0 < request.timeout <= 86400:
        raise CommandError(
            f"--timeout {request.timeout:g} is no time to wait; use seconds above 0, such as 60."
        )
    chosen = device_of(request.device)
    check_backend(request.backend, chosen)
    wanted = Examination(chosen, request.backend, request.timeout)
    return examine(wanted, request.ranks, System(trace_cache=default_trace_cache()), report)


def _row(own: Finding) -> CheckRow:
    return CheckRow(own.name, own.ok, str(own.level), own.found, own.fix, own.host)


def _page(report: DoctorReport) -> str:
    """A line for each check, those with something to do last."""
    width = max(len(row.name) for row in report.checks)
    order = [*Level]
    lines = []
    for row in sorted(report.checks, key=lambda row: order.index(Level(row.level))):
        where = f"{row.host}: " if row.host else ""
        lines.append(f"{row.level:<8} {row.name:<{width}}  {where}{row.found}")
        if row.fix:
            lines.append(f"{'':<8} {'':<{width}}  → {row.fix}")
    return "\n".join([*lines, "", _summary(report)])


def _summary(report: DoctorReport) -> str:
    problems = sum(not row.ok for row in report.checks)
    warnings = sum(row.ok and row.level != Level.OK for row in report.checks)
    if not problems and not warnings:
        return "Nothing is wrong."
    counts = [counted(n, what) for n, what in ((problems, "problem"), (warnings, "warning")) if n]
    return f"{' and '.join(counts)}; what to do stands below each."
