"""All that one device says, within some minutes: GPU tests, throughput, memory, kernels, speeds.

Runs the tests marked gpu, and parts that each measure one thing in a process of its own with a
limit of time, so that what fails or hangs costs its own figures alone. The figures go to a file of
the device's name in docs/gpu, and with those of all other devices to docs/benchmarks.md. Ends with
1 if something failed. `make gpu` runs it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

# Else torch.cuda.is_available() touches CUDA, and a part could fork no training.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch
from tools import gpu_page, gpu_pairs, gpu_parts, report

ROOT = Path(__file__).resolve().parents[1]
PAGE, FOLDER = gpu_page.PAGE, gpu_page.FOLDER
BUDGET_S = 470.0
"""All parts' time; the limit of each is meant for this budget, and grows and shrinks with it."""

LEAST_S = 10.0
"""A part is left out where less time than this is left."""

Rows = Iterator[dict[str, Any]]


def run_tests(device: str, limit_s: float) -> Rows:
    """The tests marked gpu, by file."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "found.xml")
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
        command += [
            "-o",
            "minversion=7",
            "-W",
            "default",
        ]  # a machine that nobody has seen may warn of anything
        command += ["--continue-on-collection-errors", f"--junitxml={found}", *gpu_tests()]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        if not found.exists():
            raise RuntimeError(f"pytest ended with {status} before it ran a test; see its output")
        yield from test_rows(found)


def gpu_tests() -> list[str]:
    """The files that have such tests: others may import what is not there."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(f.relative_to(ROOT)) for f in files if "pytest.mark.gpu" in f.read_text("utf-8")]


def test_rows(file: Path) -> Rows:
    """What pytest's report says, a row for every file of tests and one for every failure."""
    counts: dict[str, dict[str, Any]] = {}
    failed = []
    for case in ET.parse(file).iter("testcase"):
        place = case.get("classname", "")
        # A row with a text under "failed" is told apart from the table, hence another name.
        new = {"tests": place, "passed": 0, "skipped": 0, "not passed": 0}
        row = counts.setdefault(place, new)
        trouble = [child for child in case if child.tag in ("failure", "error")]
        skipped = case.find("skipped") is not None
        kind = "not passed" if trouble else "skipped" if skipped else "passed"
        row[kind] += 1
        for child in trouble:
            message = " ".join((child.get("message") or "").split())[:300]
            failed.append(f"{place}::{case.get('name')}: {message}")
    yield from counts.values()
    yield from ({"failed": reason} for reason in failed)


@dataclass(frozen=True, slots=True)
class Part:
    """What is measured in a process of its own.

    Args:
        title: of its table.
        rows: measures, and yields the table's rows; gets the device and a limit, s.
        limit_s: seconds that it may take, its start included.
        needs_gpu: whether it is left out on the CPU.
    """

    title: str
    rows: Callable[[str, float], Rows]
    limit_s: float
    needs_gpu: bool = False


def throughput(name: str, limit_s: float) -> Part:
    measured = partial(gpu_pairs.throughput, name=name)
    return Part(f"Throughput in bf16: {name}", measured, limit_s)


PARTS: dict[str, Part] = {
    "tests": Part("Tests marked gpu", run_tests, 100.0, needs_gpu=True),
    "profile": Part("Speeds", gpu_parts.profile, 25.0),
    "attention": Part("Attention in bf16, calls in a step", gpu_parts.attention, 65.0),
    "launches": Part("Kernels of a step in bf16", gpu_pairs.launches, 55.0),
    "memory": Part("Memory in bf16: forecast and peak", gpu_parts.memory, 75.0),
    "llama": throughput("Llama 1B", 100.0),
    "gpt2": throughput("GPT-2 1.5B", 100.0),
    "llama8b": throughput("Llama 8B", 80.0),
    "compiled": Part(
        "Throughput in bf16, compiled",
        partial(gpu_pairs.throughput, name="Llama 1B", trainings=gpu_pairs.COMPILED),
        120.0,
    ),
}


ORDER = (*gpu_page.FIRST, *PARTS)
"""The order of all parts on the page."""


# ---- one part, in its own process ----


def measure_part(name: str, device: str, limit_s: float, file: Path) -> None:
    """Write the rows of a part down as they come, and at last that there are no more."""
    rows: list[dict[str, Any]] = []
    failed = None
    try:
        for row in PARTS[name].rows(device, limit_s):
            rows.append(row)
            gpu_page.write(file, {"rows": rows, "failed": "stopped before its end"})
    except BaseException as error:
        failed = gpu_pairs.error_text(name, error)
        raise
    finally:
        gpu_page.write(file, {"rows": rows, "failed": failed})


# ---- all parts ----


def run_part(name: str, device: str, limit_s: float) -> dict[str, Any]:
    """A part in a fresh process, with the processes that it starts, ended when its time is over."""
    part = PARTS[name]
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "found.json")
        command = [sys.executable, str(Path(__file__).resolve()), "--part", name]
        command += ["--device", device, "--limit-s", str(limit_s), "--found", str(file)]
        process = subprocess.Popen(command, stdout=sys.stderr, cwd=ROOT, start_new_session=True)
        try:
            status = process.wait(limit_s)
            reason = f"ended with status {status}" if status else None
        except subprocess.TimeoutExpired:
            reason = f"stopped after {limit_s:.0f} s"
        finally:
            with suppress(ProcessLookupError):  # none of its processes is left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        found: dict[str, Any] = {"rows": [], "failed": None}
        if file.exists():
            found = json.loads(file.read_text("utf-8"))
    failed = found["failed"] if reason is None or found["failed"] else reason
    if reason is not None and failed == "stopped before its end":
        failed = reason
    seconds = round(time.perf_counter() - started, 1)
    return {
        "name": name,
        "title": part.title,
        "seconds": seconds,
        "failed": failed,
        "rows": found["rows"],
    }


def run_all(names: list[str], device: str, budget_s: float) -> list[dict[str, Any]]:
    """All parts one after another, within a time."""
    deadline = time.perf_counter() + budget_s
    results = []
    for name in names:
        left_s = deadline - time.perf_counter()
        if left_s < LEAST_S:
            part = {"name": name, "title": PARTS[name].title, "seconds": 0.0, "rows": []}
            results.append(part | {"failed": "left out: no time was left"})
            continue
        print(f"--- {PARTS[name].title}", file=sys.stderr, flush=True)
        limit_s = PARTS[name].limit_s * budget_s / BUDGET_S
        results.append(run_part(name, device, min(limit_s, left_s)))
        for reason in gpu_page.failures(results[-1]):
            print(f"failed: {reason}", file=sys.stderr, flush=True)
    return results


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds for all parts")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--folder", type=Path, help=f"for the figures; {FOLDER} for a GPU's")
    parser.add_argument("--page", type=Path, help=f"that shows them; {PAGE} for a GPU's")
    for name, kind in (("--part", str), ("--limit-s", float), ("--found", Path)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch sees no GPU here; --device cpu runs all parts with tiny models instead.")
    if options.part:
        measure_part(options.part, options.device, options.limit_s, options.found)
        return
    # Ended from outside, it still ends the part that runs, which is a session of its own.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    on_gpu = options.device == "cuda"
    folder = options.folder or (FOLDER if on_gpu else None)
    page = options.page or (PAGE if on_gpu else None)
    names = [name for name in options.parts if on_gpu or not PARTS[name].needs_gpu]
    machine = gpu_page.machine_of(options.device)
    parts = run_all(names, options.device, options.budget_s)
    found = {"machine": machine, "date": datetime.date.today().isoformat(), "parts": parts}
    print(json.dumps(found, indent=1) if options.json else gpu_page.section(found))
    if folder is not None:
        gpu_page.record(found, folder, page, ORDER)
    if any(gpu_page.failures(part) for part in parts):
        sys.exit(1)


if __name__ == "__main__":
    main()
