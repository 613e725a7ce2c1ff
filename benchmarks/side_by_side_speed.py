"""Scripts of several frameworks beside Merak's: throughput, memory, and lines that differ.

Each script of `benchmarks/scripts` trains the same Llama on the same samples, in a step of eight
microbatches, most of them on two ranks over gloo. A round runs every script once, in fresh
processes. Tokens per second are those of the fastest step of all rounds, which depends least on
what else the machine does; memory is the peak of the fuller rank above its imports, a median over
rounds. The loss (of the last step of a loop, the mean of all steps of a trainer) shows that all
train the same; with `--sgd` also that all gradients have the same scale, which AdamW hides.
DeepSpeed runs in an environment of its own: `--deepspeed PYTHON`.
"""

from __future__ import annotations

import ast
import difflib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.job import SAMPLES, SEQUENCE
from tools import report

FOLDER = Path(__file__).parent
SCRIPTS = FOLDER / "scripts"


@dataclass(frozen=True, slots=True)
class Case:
    """A line of the table.

    Args:
        name: what it is called.
        script: in `benchmarks/scripts`.
        options: what the script is given.
        ranks: processes.
    """

    name: str
    script: str
    options: dict[str, Any] = field(default_factory=dict)
    ranks: int = 2


def merak(name: str, degrees: dict[str, int], **options: Any) -> Case:
    """A case of Merak's loop."""
    return Case(f"Merak, {name}", "merak_loop", {"degrees": degrees, "options": options})


def pipelining(schedule: str, stages: str) -> Case:
    """A case of torch's pipelines: with one stage a rank, or two in a "loop" or a "v"."""
    options = {"schedule": f"Schedule{schedule}", "stages": stages}
    return Case(f"torch pipelining, {schedule}", "torch_pipeline", options)


PP = {"pp": 2}
CHUNKS = {"chunks": 2}
CASES = {
    "loops": (
        Case("one device", "one_device", ranks=1),
        Case("torch DDP", "ddp"),
        merak("dp=2", {"dp": 2}),
        Case("torch FSDP2", "fsdp2"),
        Case("DeepSpeed ZeRO 3", "deepspeed_zero"),
        merak("dp=2 zero=3", {"dp": 2}, zero=3),
        merak("tp=2", {"tp": 2}),
        pipelining("GPipe", "one"),
        merak("pp=2 gpipe", PP, schedule="gpipe"),
        pipelining("1F1B", "one"),
        merak("pp=2 1f1b", PP, schedule="1f1b"),
        pipelining("Interleaved1F1B", "loop"),
        merak("pp=2 interleaved_1f1b", PP, schedule="interleaved_1f1b", schedule_options=CHUNKS),
        pipelining("InterleavedZeroBubble", "loop"),
        merak(
            "pp=2 interleaved_zero_bubble",
            PP,
            schedule="interleaved_zero_bubble",
            schedule_options=CHUNKS,
        ),
        pipelining("ZBVZeroBubble", "v"),
        merak("pp=2 zero_bubble_v", PP, schedule="zero_bubble_v"),
    ),
    "trainers": (
        Case("transformers Trainer, one device", "trainer", {"replicas": 1}, ranks=1),
        Case("MerakTrainer, one device", "merak_trainer", {"degrees": {}, "replicas": 1}, ranks=1),
        Case("transformers Trainer, two replicas", "trainer", {"replicas": 2}),
        Case("MerakTrainer, dp=2", "merak_trainer", {"degrees": {"dp": 2}, "replicas": 2}),
        Case("MerakTrainer, pp=2", "merak_trainer", {"degrees": PP, "replicas": 1}),
    ),
}
"""The cases by table; the first of a table is what the others are compared with."""


def run(case: Case, python: str, options: Any) -> list[dict[str, Any]] | str:
    """Run a case in fresh processes: what every rank reports, or why there is nothing."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        shared = os.environ | {
            "WORLD_SIZE": str(case.ranks), "LOCAL_WORLD_SIZE": str(case.ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{SCRIPTS}:{FOLDER.parent / 'src'}",
            "REPORTS": folder, "OPTIONS": json.dumps(case.options), "STEPS": str(options.steps),
            "OPTIMIZER": "sgd" if options.sgd else "adamw",
        }  # fmt: skip
        if case.ranks == 1:
            shared = {name: value for name, value in shared.items() if name not in _OF_A_JOB}
        command = [python, "-W", "ignore", str(SCRIPTS / f"{case.script}.py")]
        logs = [Path(folder, f"log{rank}") for rank in range(case.ranks)]
        ranks = []
        for rank, log in enumerate(logs):
            own = shared | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if case.ranks > 1 else {})
            with log.open("wb") as into:
                ranks.append(
                    subprocess.Popen(command, env=own, stdout=into, stderr=into, cwd=folder)
                )
        reports = [Path(folder, f"rank{rank}.json") for rank in range(case.ranks)]
        problem = ended(ranks, reports, options.limit)
        if problem is None:
            return [json.loads(file.read_text()) for file in reports]
        lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
        return problem or (lines[-1] if lines else "nothing was printed")


def ended(ranks: list[subprocess.Popen[bytes]], reports: list[Path], limit_s: float) -> str | None:
    """Wait until all ranks report, and end them; else why there is nothing, empty for an error.

    Some never end by themselves once they have reported: gloo's threads, or DeepSpeed's.
    """
    until = time.monotonic() + limit_s
    try:
        while not all(file.exists() for file in reports):
            if time.monotonic() > until:
                return f"no answer in {limit_s:.0f} s"
            if any(p.poll() and not own.exists() for p, own in zip(ranks, reports)):
                return ""
            time.sleep(0.2)
        time.sleep(1.0)  # for the last file to be whole
        return None
    finally:
        for process in ranks:
            process.kill()
            process.wait()


_OF_A_JOB = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def row(case: Case, rounds: list[list[dict[str, Any]]], first_s: float | None) -> dict[str, Any]:
    """A line of the table of figures."""
    taken = [max(min(own["seconds"]) for own in ranks) for ranks in rounds]
    memory = [max(own["memory"] for own in ranks) for ranks in rounds]
    losses = [own["loss"] for own in rounds[0] if own["loss"] is not None]
    step_s = min(taken)
    return {
        "case": case.name,
        "ranks": case.ranks,
        "tokens/s": SAMPLES * SEQUENCE / step_s,
        "of the first": 1.0 if first_s is None else first_s / step_s,
        "peak MB a rank": round(statistics.median(memory) / 1e6),
        "loss": f"{losses[0]:.6f}" if losses else "",
    }


def code_of(script: str) -> list[str]:
    """The lines of a script that count: without its docstring, comments and empty lines."""
    text = (SCRIPTS / f"{script}.py").read_text(encoding="utf-8")
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(node, ast.Module | ast.ClassDef):
            is_text = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
            node.body = body[1:] if is_text else body  # type: ignore[attr-defined]
    return [line for line in ast.unparse(tree).splitlines() if line.strip()]


def lines_changed(script: str, base: str) -> dict[str, Any]:
    """Lines that a script adds to the one of a single device, and that it takes away."""
    diff = difflib.unified_diff(code_of(base), code_of(script), n=0, lineterm="")
    marks = [line[0] for line in diff if line[:3] not in ("---", "+++") and line[0] in "+-"]
    return {"script": script, "from": base, "added": marks.count("+"), "removed": marks.count("-")}


def measured(table: str, options: Any) -> list[dict[str, Any]]:
    """The lines of a table of figures."""
    cases = [
        own
        for own in CASES[table]
        if options.cases is None or any(word in own.name for word in options.cases)
    ]
    found: dict[str, list[list[dict[str, Any]]]] = {}
    for number in range(options.rounds):
        for case in cases:
            python = options.deepspeed if case.script == "deepspeed_zero" else sys.executable
            if python is None:
                print(f"{case.name}: not run; give --deepspeed PYTHON", file=sys.stderr)
                continue
            answer = run(case, python, options)
            if not isinstance(answer, str):
                found.setdefault(case.name, []).append(answer)
                own = row(case, [answer], None)
                answer = (
                    f"{own['tokens/s']:.0f} tokens/s, {own['peak MB a rank']} MB, {own['loss']}"
                )
            print(f"round {number}, {case.name}: {answer}", file=sys.stderr, flush=True)
    rows: list[dict[str, Any]] = []
    for case in cases:
        if case.name in found:
            first_s = SAMPLES * SEQUENCE / rows[0]["tokens/s"] if rows else None
            rows.append(row(case, found[case.name], first_s))
    return rows


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--tables", nargs="+", choices=[*CASES, "lines"], default=None)
    parser.add_argument("--cases", nargs="+", default=None, help="words in the names of cases")
    parser.add_argument("--steps", type=int, default=4, help="steps that a round measures")
    parser.add_argument("--rounds", type=int, default=3, help="fresh processes of every case")
    parser.add_argument("--limit", type=float, default=300, help="seconds of one case")
    parser.add_argument("--sgd", action="store_true", help="plain gradient descent, for losses")
    parser.add_argument("--deepspeed", help="the Python of an environment with DeepSpeed")
    options = parser.parse_args()
    tables = options.tables or [*CASES, "lines"]
    shown = {name: measured(name, options) for name in tables if name in CASES}
    if "lines" in tables:
        loops = dict.fromkeys(case.script for case in CASES["loops"] if case.ranks > 1)
        rows = [lines_changed(script, "one_device") for script in loops]
        shown["lines"] = [*rows, lines_changed("merak_trainer", "trainer")]
    titles = {
        "loops": "Loops of PyTorch",
        "trainers": "Trainers",
        "lines": "Lines that differ from the script of one device",
    }
    report.show({titles[name]: rows for name, rows in shown.items() if rows}, options.json)


if __name__ == "__main__":
    main()
