"""Backwards of transformers' architectures: which are graphs, and whether bits are autograd's.

    python -m benchmarks.joint [NAME …]
    python -m benchmarks.joint --all --rows FILE

Each architecture trains a step of two microbatches in its small version, once with the backwards
of its segments as graphs, once with autograd, on the same weights. Losses and gradients are
compared to the bit, and the memory of live storages is counted. Dropout stays on. Without names
it takes a sample, with `--all` every architecture of the lists of transformers that `make zoo` has,
for hours: `--rows` is a file that gains a line for each, so that a second call goes on where the
first has stopped, and the table is by task.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import merak
from benchmarks.tools import report
from benchmarks.tools.backwards import autograd_alone, obstacles
from merak.check import Case, CheckOptions, Layout
from merak.core.errors import MerakError
from merak.core.mesh import current_mesh
from merak.core.storages import Storages
from merak.data import signature
from merak.engine.build import build_engine
from merak.graph.segment.build import GraphSource
from merak.plan.engine_options import EngineOptions
from merak.zoo.check_by_name import small_version
from merak.zoo.request import Request

SAMPLE = (
    "GPT2LMHeadModel LlamaForCausalLM BertForMaskedLM T5ForConditionalGeneration "
    "MixtralForCausalLM ViTForImageClassification BloomForCausalLM MambaForCausalLM "
    "DebertaV2ForMaskedLM SegformerForImageClassification"
).split()
MICROBATCHES = 2


@dataclass(frozen=True, slots=True)
class Step:
    """Losses, gradients by name, and the most bytes of live storages of a step."""

    losses: torch.Tensor
    gradients: dict[str, torch.Tensor]
    peak_bytes: int


def step(case: Case) -> tuple[Step, Counter[str]]:
    """A training step, and why autograd runs how many backwards ("" where it does not)."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    model = case.build().train()
    batches = [case.batch(number, 2) for number in range(MICROBATCHES)]
    columns = [signature(batch).columns for batch in batches]
    source = GraphSource(
        model=model, loss_fn=case.loss_fn, loss_columns=case.loss_columns, fixed=case.fixed
    )
    options = EngineOptions(num_microbatches=MICROBATCHES)
    engine = build_engine(source, columns[0], current_mesh(), options)
    known = [*engine.parameters.values(), *model.buffers()]
    with Storages(known) as storages:
        losses = engine.train_step(0, columns, batches, 1 / MICROBATCHES)
    gradients = {n: p.grad for n, p in engine.parameters.items() if p.grad is not None}
    return Step(losses, gradients, storages.peak_bytes), obstacles(engine)


def is_equal(ours: Step, theirs: Step) -> bool:
    """Whether two steps have the same losses and gradients, to the bit."""
    if ours.gradients.keys() != theirs.gradients.keys():
        return False
    pairs = [(ours.losses, theirs.losses)]
    pairs += [(gradient, theirs.gradients[name]) for name, gradient in ours.gradients.items()]
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def row(name: str) -> dict[str, Any]:
    """Row of one architecture."""
    try:
        options = CheckOptions(num_microbatches=1, steps=1)
        case = small_version(Request(name), Layout(), options).job.case
        ours, why = step(case)
        with autograd_alone():
            theirs, _ = step(case)
    except MerakError as error:
        return {"architecture": name, "reason": f"{type(error).__name__}: {error}"[:100]}
    except Exception as error:  # our own bug, which main reports
        return {"architecture": name, "reason": f"{FAILED}{error!r}"[:100]}
    return {
        "architecture": name,
        "segments": why.total(),
        "graphs": why[""],
        "equal bits": is_equal(ours, theirs),
        "peak, of autograd's": ours.peak_bytes / theirs.peak_bytes,
        "reason": "; ".join(f"{n}: {reason}"[:100] for reason, n in why.items() if reason),
    }


FAILED = "does not train: "
"""Begins the reason of a row whose training has failed by itself."""

Rows = Sequence[dict[str, Any]]


def known_rows(path: Path) -> dict[str, dict[str, Any]]:
    """Rows of a file by architecture."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {found["architecture"]: found for found in map(json.loads, lines)}


def new_rows(names: Sequence[str], path: Path) -> Rows:
    """Rows of architectures, those that a file has not from now on, which gains them."""
    for name in [name for name in names if name not in known_rows(path)]:
        with path.open("a", encoding="utf-8") as file:
            # In its place stays a process that ends in it.
            first = {"architecture": name, "reason": f"{FAILED}the process ends"}
            file.write(json.dumps(first) + "\n")
            file.flush()
            file.write(json.dumps(row(name)) + "\n")
    found = known_rows(path)
    return [found[name] for name in names]


def by_task(rows: Rows, tasks: dict[str, str]) -> dict[str, Rows]:
    """Tables of the rows of many architectures: by task, and the reasons that autograd runs some.

    Args:
        rows: of architectures.
        tasks: by architecture.
    """
    groups = defaultdict(list)
    for found in rows:
        if "segments" in found:
            groups[tasks[found["architecture"]]].append(found)
    groups["all"] = [found for group in groups.values() for found in group]
    reasons = defaultdict(list)
    for found in groups["all"]:
        for part in filter(None, found["reason"].split("; ")):
            reasons[part.partition(": ")[2]].append(found["architecture"])
    tables: dict[str, Rows] = {
        "Backwards as graphs": [_sums(task, group) for task, group in groups.items() if group],
        "Why autograd runs the others": [
            {"reason": why, "architectures": len(names), "such as": ", ".join(sorted(names)[:3])}
            for why, names in sorted(reasons.items(), key=lambda pair: -len(pair[1]))
        ],
    }
    return {title: table for title, table in tables.items() if table}


def _sums(task: str, rows: Rows) -> dict[str, Any]:
    return {
        "task": task,
        "architectures": len(rows),
        "all graphs": sum(found["segments"] == found["graphs"] for found in rows),
        "segments": sum(found["segments"] for found in rows),
        "graphs": sum(found["graphs"] for found in rows),
        "equal bits": sum(found["equal bits"] for found in rows),
        "largest peak, of autograd's": max(found["peak, of autograd's"] for found in rows),
    }


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument(
        "--all", action="store_true", help="every architecture of transformers' lists"
    )
    parser.add_argument("--rows", type=Path, help="file with a line for each, which grows")
    options = parser.parse_args()
    from tests.zoo.architectures import PLAIN, architectures

    tasks = {name: task for name, task in architectures().items() if task != PLAIN}
    names = list(tasks) if options.all else options.names or SAMPLE
    transformers.logging.set_verbosity_error()
    merak.init(device="cpu")
    if options.rows is None:
        rows: Rows = [row(name) for name in names]
        tables: dict[str, Rows] = {"Backwards as graphs": rows}
    else:
        rows = new_rows(names, options.rows)
        tables = by_task(rows, tasks)
    report.show(tables, options.json)
    wrong = [r["architecture"] for r in rows if r.get("equal bits") is False]
    wrong += [r["architecture"] for r in rows if r["reason"].startswith(FAILED)]
    if wrong:
        sys.exit(f"other bits than autograd's, or none: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
