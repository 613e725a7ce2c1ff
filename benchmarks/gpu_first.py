"""The first minutes on a GPU: ranks that meet over NCCL, precisions, tests, speeds; 200 s at most.

One process imports everything once and forks each part before CUDA is touched. Parts stand in the
order of what is known least. Each writes its lines as they come, so that they survive a stop, and
is left out, by name, when less time is left than it needs. Two ranks share one card over NCCL:
NCCL_HOSTID makes them two hosts. What a part computes is compared with plain PyTorch on the same
device. Ends with 1 if something failed. `make gpu-first` runs it; `--device cpu` runs it over gloo.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import json
import multiprocessing as mp
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

# Else torch.cuda.is_available() in the parent touches CUDA, and no fork could use it.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import gpu
import torch
from tools import gpu_first_parts as parts
from tools import gpu_page

BUDGET_S = 200.0
DUMP_AFTER_S = 20.0
"""Seconds after which a part's processes write down where they stand."""

Rows = Iterator[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Part:
    """What some forked processes run.

    Args:
        rows: yields what they found; gets the device and a folder that all parts share. Every rank
            calls it, and rank 0's rows count.
        limit_s: seconds after which it is ended.
        ranks: how many processes.
        needs_gpu: whether it is left out on the CPU.
    """

    rows: Callable[[str, Path], Rows]
    limit_s: float = 30.0
    ranks: int = 1
    needs_gpu: bool = False


FIRST_LAYOUTS = ("pp-1f1b", "tp", "dp-zero1", "pp-interleaved", "pp-chimera", "dp-zero3")


def layouts(names: Iterable[str]) -> dict[str, Part]:
    return {name: Part(partial(parts.layout, name=name), ranks=parts.NUM_RANKS) for name in names}


PARTS: dict[str, Part] = {
    "reference": Part(parts.reference),
    **layouts(FIRST_LAYOUTS),
    "precisions": Part(parts.precisions, limit_s=60.0),
    "tests": Part(parts.gpu_tests, limit_s=90.0, needs_gpu=True),
    **layouts(name for name in parts.LAYOUTS if name not in FIRST_LAYOUTS),
    "trainers": Part(parts.trainers, limit_s=60.0),
    "speeds": Part(parts.speeds, limit_s=30.0, needs_gpu=True),
}


# ---- a part's processes ----


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_rank(name: str, rank: int, device: str, folder: Path, port: int) -> None:
    """One forked process of a part; its words go to a log, and rank 0's rows to a file."""
    part = PARTS[name]
    log = os.open(folder / f"{name}.{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = sys.stderr
    faulthandler.enable(sys.stderr)
    faulthandler.dump_traceback_later(DUMP_AFTER_S, file=sys.stderr)
    if part.ranks > 1:
        os.environ.update(
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(part.ranks),
                "LOCAL_RANK": "0" if device == "cuda" else str(rank),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                # Two ranks on one card count as two hosts, which meet over sockets.
                "NCCL_HOSTID": str(rank),
                "NCCL_SOCKET_IFNAME": "lo",
                "NCCL_IB_DISABLE": "1",
                "NCCL_DEBUG": "WARN",
                "GLOO_SOCKET_IFNAME": "lo",
            }
        )
    try:
        for row in part.rows(device, folder):
            if rank == 0:
                with (folder / f"{name}.rows").open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stderr.flush()
    os._exit(0)  # a library's own end may hang, and no figure depends on it


def run_part(name: str, device: str, folder: Path, limit_s: float) -> dict[str, Any]:
    """Fork a part's processes, and end them when their time is over."""
    started, port = time.perf_counter(), free_port()
    context = mp.get_context("fork")
    processes = [
        context.Process(target=run_rank, args=(name, rank, device, folder, port), daemon=True)
        for rank in range(PARTS[name].ranks)
    ]
    for process in processes:
        process.start()
    deadline = started + limit_s
    for process in processes:
        process.join(max(0.0, deadline - time.perf_counter()))
    late = [process.exitcode is None for process in processes]
    for process in processes:
        if process.exitcode is None:
            process.kill()
            process.join()
    failed = ""
    if any(late):
        failed = f"stopped after {limit_s:.0f} s"
    elif any(process.exitcode for process in processes):
        failed = f"ended with {[process.exitcode for process in processes]}"
    file = folder / f"{name}.rows"
    lines = file.read_text("utf-8").splitlines() if file.exists() else []
    rows = [json.loads(line) for line in lines]
    failed = failed or "; ".join(row["failed"] for row in rows if row.get("failed"))
    seconds = round(time.perf_counter() - started, 1)
    return {"part": name, "seconds": seconds, "failed": failed, "rows": rows}


def tail_of(folder: Path, name: str, lines: int = 40) -> str:
    """The ends of a part's logs."""
    found = []
    for file in sorted(folder.glob(f"{name}.*.log")):
        kept = file.read_text("utf-8", errors="replace").splitlines()[-lines:]
        found += [f"  --- {file.name}", *(f"  {line}" for line in kept)]
    return "\n".join(found)


def run_all(names: Sequence[str], device: str, budget_s: float, folder: Path) -> Rows:
    """All parts one after another, within a time."""
    deadline = time.perf_counter() + budget_s
    for name in names:
        left_s = deadline - time.perf_counter()
        if left_s < PARTS[name].limit_s / 4:
            left_out = f"left out: {left_s:.0f} s were left"
            yield {"part": name, "seconds": 0.0, "failed": left_out, "rows": []}
            continue
        yield run_part(name, device, folder, min(PARTS[name].limit_s, left_s))


def page_parts(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the page shows of the results: a row a layout, and the rows of other parts."""
    by_name = {found["part"]: found for found in results}
    shown = []
    ran = [by_name[name] for name in parts.LAYOUTS if name in by_name]
    titles = ("Two ranks on one card over NCCL, beside one process", "Precisions", "Trainers")
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
    case = parts.LAYOUTS[found["part"]]
    words = [f"{name} = {value}" for name, value in {**case.degrees, **case.options}.items()]
    words += ["evaluation"] * case.evaluates + ["resumed"] * case.resumes
    row: dict[str, Any] = {"job": ", ".join(words), "model": case.architecture}
    if found["failed"]:
        return row | {"failed": f"{row['job']}: {found['failed']}"}
    last = found["rows"][-1]
    kept = {name: last[name] for name in ("losses off by", "weights off by")}
    return row | {"seconds": found["seconds"], **kept}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds for all parts")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/gpu-first"), help="for lines, logs"
    )
    options = parser.parse_args(arguments)
    on_gpu = options.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        sys.exit("torch sees no GPU here; --device cpu runs the parts over gloo instead.")
    options.folder.mkdir(parents=True, exist_ok=True)
    for old in (*options.folder.glob("*.rows"), *options.folder.glob("*.log")):
        old.unlink()
    parts.load()
    names = [name for name in options.parts if on_gpu or not PARTS[name].needs_gpu]
    results = []
    with (options.folder / "first.jsonl").open("w", encoding="utf-8") as file:
        for found in run_all(names, options.device, options.budget_s, options.folder):
            results.append(found)
            file.write(json.dumps(found) + "\n")
            file.flush()
            state = found["failed"] or "right"
            print(f"{found['part']:24} {found['seconds']:6.1f} s  {state}", flush=True)
            for row in found["rows"]:
                print(f"    {json.dumps(row)}", flush=True)
            if found["failed"]:
                print(tail_of(options.folder, found["part"]), flush=True)
    if on_gpu:
        told: dict[str, Any] = {"machine": gpu_page.machine_of("cuda")}
        told |= {"date": str(datetime.date.today()), "parts": page_parts(results)}
        gpu_page.record(told, gpu_page.FOLDER, gpu_page.PAGE, gpu.ORDER)
    num_failed = sum(bool(found["failed"]) for found in results)
    if num_failed:
        sys.exit(f"{num_failed} of {len(names)} parts failed.")


if __name__ == "__main__":
    main()
