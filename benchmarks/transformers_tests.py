"""transformers' own tests of its trainer, run with Merak's classes in place of transformers'.

    git clone --depth 1 --branch v5.23.0 https://github.com/huggingface/transformers /tmp/their
    pip install parameterized sentencepiece optuna
    python benchmarks/transformers_tests.py /tmp/their [-k NAME] [--json FILE]

Every file `tests/trainer/test_*.py` that builds a trainer or training arguments runs twice in a
job of one rank, slow tests too: with transformers' classes, and with `MerakTrainer` for `Trainer`
and `MerakArguments` for `TrainingArguments` (for `Seq2SeqTrainer`, the class that has both bases).
The tests are those of the tree that is given, and transformers is the installed one. Models and
datasets of the hub are replaced by small ones of the same kind, made on the spot; tests of names
that the installed transformers has no longer are skipped.

The table shows both results side by side. Below it stands every test that fails with Merak and
passes with transformers, with its reason: from `data/transformers_tests.json` where the difference
is meant, otherwise the error. The exit status is 1 where a reason is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
REASONS = HERE / "data" / "transformers_tests.json"
OUTCOMES = ("passed", "failed", "skipped")


@dataclass(frozen=True)
class Result:
    """How a test ended."""

    outcome: str
    reason: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="a source tree of transformers")
    parser.add_argument("-k", default="", help="run tests whose names match, as pytest's -k")
    parser.add_argument("--classes", choices=("both", "merak", "transformers"), default="both")
    parser.add_argument("--json", type=Path, help="where to write all results")
    parser.add_argument("--seconds", type=int, default=180, help="that a test may take")
    options = parser.parse_args()
    options.source = options.source.resolve()  # pytest runs in a folder of its own
    files = judged_files(options.source)
    if not files:
        parser.error(f"{options.source} has no tests/trainer; give a clone of the repository.")
    chosen = ("transformers", "merak") if options.classes == "both" else (options.classes,)
    with tempfile.TemporaryDirectory() as scratch:
        prepare(Path(scratch))
        found = {name: run(name, files, options, Path(scratch)) for name in chosen}
    if options.json is not None:
        rows = {c: {t: vars(r) for t, r in results.items()} for c, results in found.items()}
        options.json.write_text(json.dumps(rows, indent=1))
    print(table(found))
    return explain(found)


def judged_files(source: Path) -> list[Path]:
    """Test files of one process that build a trainer or its arguments."""
    files = sorted((source / "tests" / "trainer").glob("test_*.py"))
    names = re.compile(r"\b(Trainer|TrainingArguments|Seq2SeqTrainer)\(")
    return [file for file in files if names.search(file.read_text(encoding="utf-8"))]


def prepare(scratch: Path) -> None:
    """Write the small models, in a process that has imported no test."""
    code = "import sys; from pathlib import Path; from drop_in.hub_models import fill_cache; "
    code += "fill_cache(Path(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(scratch / "home")]
    subprocess.run(command, check=True, env=environment(scratch))
    (scratch / "pytest.ini").write_text("[pytest]\n")


def environment(scratch: Path) -> dict[str, str]:
    further = {
        "HF_HOME": str(scratch / "home"),
        "HF_HUB_OFFLINE": "1",
        "MERAK_CACHE": str(scratch / "traces"),
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
        "RUN_SLOW": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return {**os.environ, **further}


def run(
    classes: str, files: list[Path], options: argparse.Namespace, scratch: Path
) -> dict[str, Result]:
    """Run the tests with one library's classes; results by the tests' names."""
    results = scratch / f"{classes}.jsonl"
    results.touch()
    further = {
        "DROP_IN_CLASSES": classes,
        "DROP_IN_RESULTS": str(results),
        "DROP_IN_TEST_S": str(options.seconds),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-c", str(scratch / "pytest.ini")]
    command += ["--rootdir", str(options.source), "-p", "drop_in.plugin", "-p", "no:cacheprovider"]
    command += ["-W", "ignore", "--tb=short", *(["-k", options.k] if options.k else [])]
    command += map(str, files)
    log = options.json.with_suffix(f".{classes}.log") if options.json else scratch / "log"
    with log.open("w") as output:
        subprocess.run(
            command,
            cwd=scratch,
            env=environment(scratch) | further,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    lines = map(json.loads, results.read_text(encoding="utf-8").splitlines())
    found = {line["test"]: Result(line["outcome"], line["reason"]) for line in lines}
    if not found:
        raise SystemExit(f"no test ran with the classes of {classes}:\n{log.read_text()[-2000:]}")
    return found


def table(found: Mapping[str, Mapping[str, Result]]) -> str:
    """Numbers of tests that passed, failed and were skipped, a line for each file."""
    files = sorted({name.split("::")[0] for results in found.values() for name in results})
    head = " | ".join(f"{classes}: {outcome}" for classes in found for outcome in OUTCOMES)
    lines = [f"| file | {head} |", "|---" * (1 + 3 * len(found)) + "|"]
    for file in [*files, ""]:
        cells = []
        for results in found.values():
            counts = Counter(r.outcome for n, r in results.items() if n.startswith(file))
            cells += [str(counts[outcome]) for outcome in OUTCOMES]
        lines.append(f"| {Path(file).name or 'all'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def explain(found: Mapping[str, Mapping[str, Result]]) -> int:
    """Print the tests that fail with Merak alone; 1 where one has no reason."""
    if "merak" not in found:
        return 0
    theirs = found.get("transformers", {})
    meant: dict[str, str] = json.loads(REASONS.read_text(encoding="utf-8"))
    unexplained = 0
    for name, result in found["merak"].items():
        unknown = "passed" if result.outcome == "failed" else result.outcome
        other = theirs.get(name, Result(unknown, "")).outcome
        if result.outcome == "passed" or result.outcome == other or other == "failed":
            continue
        _, *ends = name.split("::")
        reason = meant.get(ends[-1]) or meant.get("::".join(ends[-2:]))
        unexplained += reason is None
        reason = reason or f"UNEXPLAINED: {result.reason[:400]}"
        print(f"\n{result.outcome}: {name.split('/')[-1]}\n    {reason}")
    return int(unexplained > 0)


if __name__ == "__main__":
    sys.exit(main())
