"""Parts of a measurement, each in processes forked from one that has imported everything.

A fork may use the device only if its parent never has: PYTORCH_NVML_BASED_CUDA_CHECK=1 lets the
parent ask whether there is one. Rows are written down as they come, so that they survive a stop; a
part that fails or hangs costs its own rows alone; and one that needs more time than is left is left
out, by name.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing as mp
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Else torch.cuda.is_available() in the parent touches CUDA.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

STARTED = time.perf_counter()
"""About when the process began: imports that follow count as its time."""

DUMP_AFTER_S = 20.0
"""Seconds after which the ranks of a part write down where they stand, and once more each time."""

Rows = Iterator[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Part:
    """What some forked processes run.

    Args:
        rows: yields what they found; gets the device, a folder that all parts share, and seconds
            that it has. Every rank calls it, and rank 0's rows count.
        needs_s: seconds without which it is left out.
        limit_s: seconds after which it is ended on a GPU; a CPU may take all that are left.
        title: of its table.
        ranks: how many processes.
        needs_gpu: whether it is left out on the CPU.
    """

    rows: Callable[[str, Path, float], Rows]
    needs_s: float
    limit_s: float
    title: str = ""
    ranks: int = 1
    needs_gpu: bool = False


def run_all(
    parts: Mapping[str, Part], names: Sequence[str], device: str, deadline: float, folder: Path
) -> Rows:
    """All parts one after another, within a time; each as a dict as soon as it has ended.

    Args:
        parts: by name.
        names: of those to run, in order.
        device: "cuda" or "cpu".
        deadline: when no part may go on, by `time.perf_counter`.
        folder: for rows and logs; what an earlier run left there is removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("*.rows"), *folder.glob("*.log")):
        old.unlink()
    with (folder / "parts.jsonl").open("w", encoding="utf-8") as file:
        for name in names:
            part, left_s = parts[name], deadline - time.perf_counter()
            if part.needs_gpu and device == "cpu":
                continue
            found: dict[str, Any] = {"name": name, "title": part.title, "seconds": 0.0}
            if left_s < part.needs_s:
                reason = f"left out: it needs {part.needs_s:.0f} s, {max(left_s, 0):.0f} were left"
                found |= {"failed": reason, "rows": []}
            else:
                limit_s = min(part.limit_s, left_s) if device == "cuda" else left_s
                found |= run_part(name, part, device, folder, limit_s)
            file.write(json.dumps(found) + "\n")
            file.flush()
            tell(found, folder)
            yield found


def run_part(name: str, part: Part, device: str, folder: Path, limit_s: float) -> dict[str, Any]:
    """Fork a part's processes, and end them and what they started when their time is over."""
    started, port = time.perf_counter(), free_port()
    context = mp.get_context("fork")
    processes = [
        context.Process(target=run_rank, args=(name, part, rank, device, folder, port, limit_s))
        for rank in range(part.ranks)
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(0.0, started + limit_s - time.perf_counter()))
        codes = [process.exitcode for process in processes]
    finally:  # also where this process is ended from outside
        for process in processes:
            if process.pid is not None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
                process.join()
    failed = None
    if None in codes:
        failed = f"stopped after {limit_s:.0f} s"
    elif any(codes):
        failed = error_of(folder, name) or f"ended with {codes}"
    file = folder / f"{name}.rows"
    lines = file.read_text("utf-8").splitlines() if file.exists() else []
    rows = [json.loads(line) for line in lines]
    return {"seconds": round(time.perf_counter() - started, 1), "failed": failed, "rows": rows}


def run_rank(
    name: str, part: Part, rank: int, device: str, folder: Path, port: int, limit_s: float
) -> None:
    """One forked process of a part; its words go to a log, and rank 0's rows to a file."""
    os.setpgid(0, 0)  # with what it starts, to be ended together
    log = os.open(folder / f"{name}.{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.enable(sys.stderr)
    if part.ranks > 1:
        faulthandler.dump_traceback_later(DUMP_AFTER_S, repeat=True, file=sys.stderr)
        os.environ.update(environment_of(rank, part.ranks, device, port))
    try:
        for row in part.rows(device, folder, limit_s):
            if rank == 0:
                with (folder / f"{name}.rows").open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    except BaseException as error:
        traceback.print_exc()
        (folder / f"{name}.{rank}.error.log").write_text(error_text(name, error), "utf-8")
        sys.stderr.flush()
        os._exit(1)
    sys.stderr.flush()
    os._exit(0)  # a library's own end may hang, and no figure depends on it


def environment_of(rank: int, ranks: int, device: str, port: int) -> dict[str, str]:
    """Variables of a rank among several on one card: to NCCL they are hosts that meet on `lo`."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": "0" if device == "cuda" else str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NCCL_HOSTID": str(rank),
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_DEBUG": "WARN",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ---- what is told ----


def error_text(what: str, error: BaseException) -> str:
    """An error in one line, behind what it befell."""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{what}: {type(error).__name__}: {first}"[:500]


def error_of(folder: Path, name: str) -> str | None:
    """The first error that a rank of a part has written down."""
    files = sorted(folder.glob(f"{name}.*.error.log"))
    return files[0].read_text("utf-8") if files else None


def failures(found: Mapping[str, Any]) -> list[str]:
    """What did not come to figures, in a part as a whole or in one of its rows."""
    whole = [found["failed"]] if found["failed"] else []
    return [*whole, *(row["failed"] for row in found["rows"] if row.get("failed"))]


def tell(found: Mapping[str, Any], folder: Path) -> None:
    """Print a part that has ended: a line, its rows, and the ends of its logs if it has failed."""
    reasons = failures(found)
    line = f"{found['name']:24} {found['seconds']:6.1f} s  {'; '.join(reasons) or 'right'}"
    print(line, file=sys.stderr, flush=True)
    for row in found["rows"]:
        print(f"    {json.dumps(row)}", file=sys.stderr, flush=True)
    if reasons:
        print(tail_of(folder, found["name"]), file=sys.stderr, flush=True)


def tail_of(folder: Path, name: str, lines: int = 80) -> str:
    """The ends of a part's logs."""
    found = []
    for file in sorted(folder.glob(f"{name}.[0-9].log")):
        kept = file.read_text("utf-8", errors="replace").splitlines()[-lines:]
        found += [f"  --- {file.name}", *(f"  {line}" for line in kept)]
    return "\n".join(found)
