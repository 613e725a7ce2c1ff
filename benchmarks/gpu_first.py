"""The first minutes on a GPU: ranks that meet over NCCL, precisions, tests, speeds; 200 s at most.

One process imports everything once and forks each part before CUDA is touched. Parts stand in the
order of what is known least. Each writes its lines as they come, so that they survive a stop, and
is left out, by name, when less time is left than it needs. Two or four ranks share one card over
NCCL: NCCL_HOSTID makes each a host. What a part computes is compared with plain PyTorch on the same
device. Ends with 1 if something failed. `make gpu-first` runs it; `--device cpu` runs it over gloo.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tools import forked, gpu_page
from tools import gpu_first_parts as parts
from tools.forked import Part, Rows

import torch  # isort: skip

BUDGET_S = 200.0
"""Time of all, imports included."""

FIRST_LAYOUTS = ("pp-1f1b", "pp-interleaved", "pp-chimera", "pp-tp", "dp-zero1", "dp-zero3")


def part(rows: Callable[[str, Path], Rows], needs_s: float, limit_s: float, **options: Any) -> Part:
    """A part that minds no limit."""
    return Part(lambda device, folder, _: rows(device, folder), needs_s, limit_s, **options)


def layouts(names: Iterable[str]) -> dict[str, Part]:
    return {
        name: part(partial(parts.layout, name=name), 7.0, 30.0, ranks=parts.LAYOUTS[name].num_ranks)
        for name in names
    }


PARTS: dict[str, Part] = {
    "reference": part(parts.reference, 5.0, 30.0),
    **layouts(FIRST_LAYOUTS),
    "precisions": part(parts.precisions, 45.0, 80.0),
    **layouts(name for name in parts.LAYOUTS if name not in FIRST_LAYOUTS),
    "tests": part(parts.gpu_tests, 15.0, 60.0, needs_gpu=True),
    "trainers": part(parts.trainers, 15.0, 60.0),
    "speeds": part(parts.speeds, 8.0, 30.0, needs_gpu=True),
}


# ---- the page ----


def page_parts(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the page shows of the results: a row a layout, and the rows of other parts."""
    by_name = {found["name"]: found for found in results}
    shown = []
    ran = [by_name[name] for name in parts.LAYOUTS if name in by_name]
    titles = ("Ranks that share one card over NCCL, beside one process", "Precisions", "Trainers")
    rows = {
        "nccl": [layout_row(found) for found in ran],
        **{name: by_name[name]["rows"] for name in gpu_page.FIRST if name in by_name},
    }
    for name, title in zip(gpu_page.FIRST, titles, strict=True):
        if rows.get(name):
            shown.append({"name": name, "title": title, "failed": None, "rows": rows[name]})
    return shown


def layout_row(found: dict[str, Any]) -> dict[str, Any]:
    """The last line of a layout, which has its comparison, or why it failed."""
    case = parts.LAYOUTS[found["name"]]
    words = [f"{name} = {value}" for name, value in {**case.degrees, **case.options}.items()]
    words += ["evaluation"] * case.evaluates + ["resumed"] * case.resumes
    row: dict[str, Any] = {"job": ", ".join(words), "model": case.architecture}
    if reasons := forked.failures(found):
        return row | {"failed": f"{row['job']}: {'; '.join(reasons)}"}
    last = found["rows"][-1]
    kept = {name: last[name] for name in ("losses off by", "weights off by")}
    return row | {"seconds": found["seconds"], **kept}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds, with imports")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/gpu-first"), help="for lines, logs"
    )
    options = parser.parse_args(arguments)
    on_gpu = options.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        sys.exit("torch sees no GPU here; --device cpu runs the parts over gloo instead.")
    parts.load()
    deadline = forked.STARTED + options.budget_s
    results = list(forked.run_all(PARTS, options.parts, options.device, deadline, options.folder))
    if on_gpu:
        found: dict[str, Any] = {"machine": gpu_page.machine_of("cuda")}
        found |= {"date": datetime.date.today().isoformat(), "parts": page_parts(results)}
        gpu_page.record(found, gpu_page.FOLDER, gpu_page.PAGE)
    num_failed = sum(bool(forked.failures(found)) for found in results)
    if num_failed:
        sys.exit(f"{num_failed} of {len(results)} parts failed.")


if __name__ == "__main__":
    main()
