"""How long `merak check` takes, each time in a fresh process.

`seconds` are those of a user who waits: Python's start and all imports count. `CPU s` are those of
the command and all its ranks together: beside other work they say more. Figures are medians.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

from tools import report

MODELS = (
    "LlamaForCausalLM",
    "T5ForConditionalGeneration",
    "GPT2LMHeadModel",
    "ResNetForImageClassification",
    "MobileNetV2ForImageClassification",
    "SwinForImageClassification",
    "WhisperForConditionalGeneration",
    "MixtralForCausalLM",
    "SegformerForSemanticSegmentation",
    "Qwen3_5ForCausalLM",
    "DeepseekV4ForCausalLM",
    "Qwen4ExpForCausalLM",
)
COMMAND = "import sys; from merak.cli.main import main; sys.exit(main())"


def run(model: str, arguments: list[str]) -> dict[str, Any]:
    """One `merak check` in a process of its own."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "check", "--model", model, *arguments, "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"merak check --model {model} failed: {done.stderr.strip()}")
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {**json.loads(done.stdout), "seconds": seconds, "cpu": used}


def row_of(model: str, arguments: list[str], repetitions: int) -> dict[str, Any]:
    """The medians of some checks of a model."""
    runs = [run(model, arguments) for _ in range(repetitions)]
    return {
        "model": model,
        "segments": runs[0]["segments"],
        "float64 too": "yes" if runs[0]["tolerance"] > 1e-5 else "no",
        "seconds": statistics.median(found["seconds"] for found in runs),
        "CPU s": statistics.median(found["cpu"] for found in runs),
    }


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--repetitions", type=int, default=3, help="checks of each model")
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="their class names")
    parser.add_argument("--tp", type=int, default=2, help="tensor parallel degree")
    parser.add_argument("--pp", type=int, default=2, help="pipeline parallel degree")
    args = parser.parse_args()
    degrees = ["--tp", str(args.tp), "--pp", str(args.pp)]
    rows = [row_of(model, degrees, args.repetitions) for model in args.models]
    report.show({f"merak check, tp={args.tp} pp={args.pp}": rows}, args.json)


if __name__ == "__main__":
    main()
