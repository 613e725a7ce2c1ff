"""All that one device says, within some minutes: throughput, memory, attention, kernels, speeds.

One process imports everything once and forks each part before CUDA is touched. Parts stand in the
order of what is known least, and never two on the device at once. Each is left out, by name, when
less time is left than it needs. The figures go to a file of the device's name in docs/gpu, and with
those of all other devices to docs/benchmarks.md. Ends with 1 if something failed. `make gpu` and
`make gpu-compiled` run it, after `make gpu-first`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tools import forked, gpu_jobs, gpu_page, gpu_pairs, gpu_parts, report
from tools.forked import Part, Rows

import torch  # isort: skip

PAGE, FOLDER = gpu_page.PAGE, gpu_page.FOLDER
BUDGET_S = 400.0
"""Time of all, imports included."""


def part(title: str, rows: Callable[[str, float], Rows], needs_s: float, limit_s: float) -> Part:
    """A part that needs no folder."""
    return Part(lambda device, _, limit_s: rows(device, limit_s), needs_s, limit_s, title)


def throughput(name: str, needs_s: float, limit_s: float) -> Part:
    measured = partial(gpu_pairs.throughput, name=name)
    return part(f"Throughput in bf16: {name}", measured, needs_s, limit_s)


DOCUMENTS = partial(
    gpu_pairs.throughput, name="Llama 8B", trainings=gpu_pairs.TRAININGS[:2], documents=8
)
COMPILED = partial(gpu_pairs.throughput, name="Llama 1B", trainings=gpu_pairs.COMPILED)
FLOAT8 = partial(gpu_pairs.throughput, name="Llama 8B", trainings=gpu_pairs.FLOAT8)
CHUNKED = partial(gpu_pairs.throughput, name="Llama 8B", trainings=gpu_pairs.CHUNKED)

PARTS: dict[str, Part] = {
    "llama": throughput("Llama 1B", 45.0, 100.0),
    "memory": part("Memory in bf16: forecast and peak", gpu_parts.memory, 35.0, 60.0),
    "attention": part("Attention in bf16, calls in a step", gpu_parts.attention, 30.0, 80.0),
    "profile": part("Speeds", gpu_parts.profile, 5.0, 20.0),
    "compiled": part("Throughput in bf16, compiled", COMPILED, 50.0, 120.0),
    "chunked": part("Throughput in bf16, the head in chunks", CHUNKED, 40.0, 90.0),
    "float8": part("Throughput in bf16 and in float8", FLOAT8, 60.0, 130.0),
    "llama8b": throughput("Llama 8B", 35.0, 70.0),
    "documents": part("Throughput in bf16: rows of eight documents", DOCUMENTS, 25.0, 60.0),
    "launches": part("Kernels of a step in bf16", gpu_pairs.launches, 30.0, 50.0),
    "offload": part("Offloaded activations", gpu_jobs.offload, 25.0, 50.0),
    "optimizer": part("The optimizer in host memory", gpu_jobs.offload_optimizer, 15.0, 70.0),
    "rehearsal": part("One rank of an 8B on h100:8", gpu_jobs.rehearsed, 50.0, 110.0),
    "gpt2": throughput("GPT-2 1.5B", 50.0, 90.0),
}
COMPILED_PARTS = ("compiled", "chunked", "float8")
"""Those of `make gpu-compiled`; `make gpu` runs the others."""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds, with imports")
    parts = [name for name in PARTS if name not in COMPILED_PARTS]
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=parts)
    parser.add_argument("--folder", type=Path, help=f"for the figures; {FOLDER} for a GPU's")
    parser.add_argument("--page", type=Path, help=f"that shows them; {PAGE} for a GPU's")
    parser.add_argument(
        "--lines", type=Path, default=Path("runs/gpu"), help="folder for lines, logs"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    on_gpu = options.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        sys.exit("torch sees no GPU here; --device cpu runs all parts with tiny models instead.")
    # Ended from outside, it still ends the part that runs, which is a group of its own.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    folder = options.folder or (FOLDER if on_gpu else None)
    page = options.page or (PAGE if on_gpu else None)
    deadline = forked.STARTED + options.budget_s
    ran = list(forked.run_all(PARTS, options.parts, options.device, deadline, options.lines))
    found: dict[str, Any] = {"machine": gpu_page.machine_of(options.device)}
    found |= {"date": datetime.date.today().isoformat(), "parts": ran}
    print(json.dumps(found, indent=1) if options.json else gpu_page.section(found))
    if folder is not None:
        gpu_page.record(found, folder, page)
    if any(forked.failures(one) for one in ran):
        sys.exit(1)


if __name__ == "__main__":
    main()
