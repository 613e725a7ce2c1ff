"""Check every architecture of the zoo in every layout: `python -m tests.zoo.run RESULTS.jsonl`.

One line of results for each architecture and layout, written as soon as it is known: a run that was
broken off goes on where it stopped. Several processes may share the work (`--shard 0/4`), each with
a file of its own. Ranks start once and serve all architectures.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from merak.check import CheckOptions, CheckReport, Job, Layout, Workspace, check_against
from merak.check.reference import with_reference
from merak.zoo.check_by_name import small_version
from merak.zoo.request import Request
from merak.zoo.smallest import Trained
from tests.multirank.ranks import RankPool
from tests.zoo.architectures import architectures
from tests.zoo.plain.models import BY_NAME, case_of

LAYOUTS = {
    "pp=2": Layout(pp=2),
    "tp=2": Layout(tp=2),
    "tp=2, pp=2": Layout(tp=2, pp=2),
    "evaluate": Layout(tp=2, pp=2),
}
"""The columns of the table."""

EVALUATE = "evaluate"
"""The column of the outputs in evaluation before, between and after the steps."""

OPTIONS = CheckOptions(num_microbatches=2, microbatch=4, steps=2)
EAGER = "eager"
"""Stands for the layout where plain PyTorch fails already."""

MOST_EAGER_S = 120
MOST_RANKS_S = 120.0
"""Seconds after which an architecture is given up."""


@dataclass(frozen=True, slots=True)
class Result:
    """One line of results.

    Args:
        architecture: its class.
        layout: a key of `LAYOUTS`, or `EAGER`.
        report: what the check found; None while it runs, or if there was nothing to check.
        reason: why there is no report.
    """

    architecture: str
    layout: str
    report: dict[str, Any] | None = None
    reason: str | None = None


def main() -> None:
    """Run what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="file that lines are appended to")
    parser.add_argument("--shard", default="0/1", help="which part of the zoo: 0/4 … 3/4")
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--only", nargs="*", help="these architectures alone")
    parser.add_argument("--again", action="store_true", help="those that failed, once more")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    index, count = map(int, arguments.shard.split("/"))
    names = arguments.only or sorted(architectures())[index::count]
    known = {k: r for k, r in read(arguments.results).items() if k[1] != EAGER or r.reason}
    if arguments.again:
        known = {key: r for key, r in known.items() if r.report and r.report["ok"]}
    with tempfile.TemporaryDirectory() as traces:
        os.environ.setdefault("MERAK_CACHE", traces)  # ranks share what they trace there
        pool = RankPool()
        try:
            for name in names:
                missing = [n for n in arguments.layouts if (name, n) not in known]
                if missing and ((name, EAGER) not in known):
                    _check(name, missing, pool, Writer(arguments.results))
        finally:
            pool.close()


def read(file: Path) -> dict[tuple[str, str], Result]:
    """The last result of every architecture and layout in a file."""
    if not file.exists():
        return {}
    lines = file.read_text(encoding="utf-8").splitlines()
    results = [Result(**json.loads(line)) for line in lines if line]
    return {(r.architecture, r.layout): r for r in results}


class Writer:
    """Appends results to a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __call__(self, result: Result) -> None:
        """Append one line, and show it."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(asdict(result))
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")
        if result.reason != RUNNING:
            print(line, flush=True)


RUNNING = "the process ended while it was checked"
"""Stays as the reason if a model takes the whole process with it."""


def _check(name: str, layouts: list[str], pool: RankPool, write: Writer) -> None:
    write(Result(name, EAGER, reason=RUNNING))
    try:
        with within(MOST_EAGER_S):
            trained = _trained(name)
    except Exception as error:
        write(Result(name, EAGER, reason=f"{type(error).__name__}: {error}"))
        return
    with tempfile.TemporaryDirectory(prefix="merak-zoo-") as folder:
        workspace = Workspace(Path(folder), _launch(pool))
        for layout in layouts:
            write(_result(name, layout, trained, workspace))
    write(Result(name, EAGER))


def _trained(name: str) -> Trained:
    layout = Layout(tp=2, pp=2)
    if name not in BY_NAME:
        return small_version(Request(name), layout, OPTIONS)
    job = Job(case_of(BY_NAME[name]), layout, OPTIONS)
    return Trained(*with_reference(job))


def _result(name: str, layout: str, trained: Trained, workspace: Workspace) -> Result:
    options = replace(OPTIONS, evaluate=layout == EVALUATE)
    job = Job(trained.job.case, LAYOUTS[layout], options)
    try:
        with within(MOST_EAGER_S + int(MOST_RANKS_S)):
            expected = trained.outcome
            if options.evaluate:
                job, expected = with_reference(job)
            report: CheckReport = check_against(expected, job, workspace)
    except Exception as error:  # of one architecture; the others go on
        return Result(name, layout, reason=f"{type(error).__name__}: {error}")
    return Result(name, layout, report=asdict(report))


def _launch(pool: RankPool) -> Callable[..., Any]:
    def launch(function: Callable[..., Any], arguments: tuple[Any, ...], num_ranks: int) -> Any:
        return pool.run(function, num_ranks, *arguments, timeout_s=MOST_RANKS_S)

    return launch


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Raise `TimeoutError` where a block takes longer."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


if __name__ == "__main__":
    main()
