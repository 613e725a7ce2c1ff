"""The fastest plan of each of twenty jobs, as arguments, and what the best of another kind costs.

    python -m benchmarks.which_strategy [--row TEXT] [--page docs/which-strategy.md [--check]]

Every row of `data/strategies.csv` is a model, a cluster and a batch, which `merak plan` searches;
no device is needed. With `--page`, the rows that were planned replace those of the page's table,
and what wins how often is counted over all of them; with `--check`, a row of the page that differs
from what is planned is an error.
"""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.tools import report
from merak.core.units import counted, seconds
from merak.plan.options import LAYOUT
from merak.plan.price.candidate import Candidate

JOBS = Path(__file__).parent / "data" / "strategies.csv"
PRECISIONS = {
    "bf16": ("--dtype", "bfloat16", "--master-weights"),
    "fp16": ("--dtype", "float32", "--autocast", "float16"),
}
HEADS = ("model", "devices", "samples", "arguments", "step", "the best of other kinds")
DEFAULTS = {
    own.name: own.default
    for own in fields(Candidate)
    if own.name in LAYOUT and own.name not in ("schedule_options", "partition")
}
"""Options of a plan that its arguments name where it has others."""

MOST_KINDS = 3
"""Other kinds of schedules that a row names."""


def jobs() -> list[dict[str, str]]:
    """Rows of the table of jobs."""
    with JOBS.open() as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def planned(job: Mapping[str, str]) -> dict[str, Any]:
    """Report of `merak plan` on a job."""
    command = [sys.executable, "-m", "merak", "plan", job["class"], "--config", job["config"]]
    command += ["--cluster", job["cluster"], "--global-batch", job["batch"], "--json"]
    command += ["--seq", job["tokens"]] if job["tokens"] else []
    command += PRECISIONS[job["precision"]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def arguments(plan: Mapping[str, Any]) -> list[str]:
    """A plan as three lines of a script."""
    degrees = [f"{axis}={plan[axis]}" for axis in ("dp", "tp", "pp", "ep", "cp") if plan[axis] > 1]
    options = {name: plan[name] for name, usual in DEFAULTS.items() if plan[name] != usual}
    if plan["schedule_options"]:
        options["schedule_options"] = plan["schedule_options"]
    if "," in str(options.get("recompute")):
        options["recompute"] = "auto"
    if plan["pp"] == 1:
        options.pop("schedule", None)
    if not plan["balanced"]:
        options["partition"] = plan["partition"]
    named = [f"{name}={value!r}" for name, value in options.items()]
    size = f"per_device_train_batch_size={plan['microbatch']}"
    return [
        f"merak.init({', '.join(degrees)})",
        f"{size}, gradient_accumulation_steps={plan['num_microbatches']}",
        ", ".join(named) or "no option",
    ]


def row_of(job: Mapping[str, str], found: Mapping[str, Any]) -> tuple[str, ...]:
    """Row of a job in the page's table."""
    best = found["plans"][0]
    kinds = [
        f"{own['what']} +{own['plan']['step_seconds'] / best['step_seconds'] - 1:.0%}"
        for own in found["kinds"]
    ]
    return (
        *row_key(job),
        "<br>".join(f"`{line}`" for line in arguments(best)),
        seconds(best["step_seconds"]),
        ", ".join(kinds[:MOST_KINDS]) or "none fits",
    )


def is_row(line: str) -> bool:
    """Whether a line of the page is a row of the table."""
    return line.startswith("|") and "`merak.init(" in line


def cells(line: str) -> tuple[str, ...]:
    """Cells of a row of the page."""
    return tuple(cell.strip() for cell in line.strip().strip("|").split(" | "))


def counts(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """How often each choice is that of the fastest plan, in words."""
    chosen = [row[3] for row in rows]
    pipelines = [own for own in chosen if " pp=" in own or "(pp=" in own]
    schedules = Counter(
        own.partition("schedule='")[2].partition("'")[0] or "1f1b" for own in pipelines
    )
    words = ", ".join(f"`{name}` in {number}" for name, number in schedules.most_common())
    yield f"- Of {len(rows)} jobs, {counted(len(pipelines), 'job')} have a pipeline: {words}."
    for what, text in (
        ("tensor parallelism", "tp="),
        ("sequence parallelism", "sequence_parallel=True"),
        ("sub-pipelining", "sub_pipelining='on'"),
        ("experts over replicas or tp", "ep="),
        ("context parallelism", "cp="),
        ("ZeRO 1", "zero=1"),
        ("ZeRO 2", "zero=2"),
        ("ZeRO 3", "zero=3"),
        ("recomputation", "recompute="),
        ("offloaded activations", "offload_activations="),
        ("offloaded optimizer", "offload_optimizer="),
    ):
        number = sum(text in own for own in chosen)
        yield f"- {what[0].upper()}{what[1:]}: {number} of {len(rows)}."


def written(page: Path, rows: Sequence[Sequence[str]]) -> None:
    """Write rows into the page's table, and the counts behind it."""
    lines = page.read_text().splitlines()
    known = {cells(line)[:3]: cells(line) for line in lines if is_row(line)}
    known |= {tuple(row[:3]): tuple(row) for row in rows}
    order = [row_key(job) for job in jobs()]
    table = [known[key] for key in order if key in known]
    begin, end = lines.index("<!-- plans -->"), lines.index("<!-- end of plans -->")
    body = ["", *counts(table), "", f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    body += [f"| {' | '.join(row)} |" for row in table]
    page.write_text("\n".join([*lines[: begin + 1], *body, "", *lines[end:], ""]))


def agree(row: Sequence[str], kept: Sequence[str]) -> bool:
    """Whether a row is that of the page, its seconds to three digits."""
    if len(row) != len(kept) or row[3] != kept[3]:
        return False
    (ours, unit), (theirs, other) = row[4].split(), kept[4].split()
    return unit == other and math.isclose(float(ours), float(theirs), rel_tol=5e-3)


def row_key(job: Mapping[str, str]) -> tuple[str, ...]:
    """The first three cells of a job's row, which say what is planned."""
    of = f" × {int(job['tokens']):,}" if job["tokens"] else " images"
    return job["model"], job["cluster"], f"{job['batch']}{of}"


def main() -> None:
    """Plan the jobs, and write or check the page."""
    parser = report.parser(__doc__)
    parser.add_argument("--row", default="", help="jobs with this text in model or cluster")
    parser.add_argument("--page", type=Path, help="page whose table gets the rows")
    parser.add_argument("--check", action="store_true", help="compare with the page's rows")
    chosen = parser.parse_args()
    rows = []
    for job in jobs():
        if chosen.row not in f"{job['model']} {job['cluster']}":
            continue
        rows.append(row_of(job, planned(job)))
        print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
        if chosen.page and not chosen.check:
            written(chosen.page, rows)
    if chosen.check:
        lines = chosen.page.read_text().splitlines()
        kept = {cells(line)[:3]: cells(line) for line in lines if is_row(line)}
        if wrong := [row for row in rows if not agree(row, kept.get(row[:3], ()))]:
            raise SystemExit(f"{chosen.page} has other rows than these: {wrong}")
    report.show({"Plans": [dict(zip(HEADS, row, strict=True)) for row in rows]}, chosen.json)


if __name__ == "__main__":
    main()
