"""Findings of checks: what was found, how bad it is, and what to do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

Fact = TypeVar("Fact")


class Level(StrEnum):
    """Severity of a finding: fine, a warning or a problem."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


class Judgement(NamedTuple):
    """Verdict of a check: its level, the finding, and what to do.

    Attributes:
        level: how bad it is.
        found: what was found, a sentence without its point.
        fix: what to do, likewise; empty where nothing is to be done.
    """

    level: Level
    found: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """A judgement, with the check and the host that it is of.

    Args:
        name: of the check.
        level: how bad it is.
        found: what was found.
        fix: what to do; empty where nothing is to be done.
        host: name of the host; empty where there is one only, or where it is about all ranks.
    """

    name: str
    level: Level
    found: str
    fix: str = ""
    host: str = ""

    @property
    def ok(self) -> bool:
        """Whether a job can run with it; warnings do not keep it from that."""
        return self.level is not Level.PROBLEM


def fine(found: str) -> Judgement:
    """Judge that nothing is to be done."""
    return Judgement(Level.OK, found)


def warning(found: str, fix: str) -> Judgement:
    """Judge that a job can run, but slowly, or not in every case."""
    return Judgement(Level.WARNING, found, fix)


def problem(found: str, fix: str) -> Judgement:
    """Judge that a job cannot run."""
    return Judgement(Level.PROBLEM, found, fix)


@dataclass(frozen=True, slots=True)
class System:
    """Sources of this host's state for the checks: files, environment, caches.

    Args:
        environment: variables of this process.
        root: folder in which proc, sys and dev are.
        trace_cache: folder of cached traces; empty for none.
    """

    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    root: Path = Path("/")
    trace_cache: str = ""

    def text(self, path: str) -> str:
        """Return the text of a file below the root; empty where it cannot be read."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    def number(self, name: str, default: int) -> int:
        """Return the number that a variable holds; the default where it holds none."""
        value = self.environment.get(name, "")
        return int(value) if value.isdecimal() else default


@dataclass(frozen=True, slots=True)
class Check(Generic[Fact]):
    """Check of `merak doctor`: what it reads, and how it judges that.

    Args:
        name: as it is shown.
        read: reads the state of the system.
        judge: yields at least one judgement of it.
        at_failed_start: whether a job that fails to start runs it: it takes well below a second.
    """

    name: str
    read: Callable[[System], Fact]
    judge: Callable[[Fact], Iterator[Judgement]]
    at_failed_start: bool = True

    def findings(self, system: System) -> list[Finding]:
        """Run the check; one that fails itself is a warning.

        Args:
            system: where the state is read.
        """
        try:
            return [Finding(self.name, *judged) for judged in self.judge(self.read(system))]
        except Exception as error:
            found = f"could not be checked ({type(error).__name__}: {error})"
            return [Finding(self.name, Level.WARNING, found, "look at it by hand")]
