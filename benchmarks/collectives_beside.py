"""Collectives that are open beside one another, between two hosts with a slow link.

    python benchmarks/collectives_beside.py [--rate 200mbit] [--ranks 2] [--sizes BYTES …]

ZeRO 3 gathers a segment's parameters while another one's gradients are reduced. Does a link carry
both faster together than one after the other? The table has, for tensors of each size: the time of
every collective alone, of both in turns, and of both open at once, and how many times the tensor's
bytes each host sends and receives meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tools import report
from tools.link import passed_bytes, slow_link

import merak
from merak.ops.collectives import all_gather, reduce_scatter

CASES = {
    "all-gather": ("gather",),
    "reduce-scatter": ("scatter",),
    "all-reduce": ("reduce",),
    "all-gather, reduce-scatter": ("gather", "scatter"),
    "two all-gathers": ("gather", "gather"),
    "two all-reduces": ("reduce", "reduce"),
}


class Tensors:
    """Tensors of one size for a collective, and for another one beside it.

    Args:
        size: bytes of a whole tensor.
    """

    def __init__(self, size: int) -> None:
        count = max(1, size // 4 // dist.get_world_size())
        self._shards = [torch.zeros(count) for _ in range(2)]
        self._wholes = [torch.zeros(count * dist.get_world_size()) for _ in range(2)]

    def begin(self, kind: str, number: int) -> Any:
        """Begin a collective."""
        whole, shard = self._wholes[number], self._shards[number]
        if kind == "gather":
            return all_gather(whole, shard, async_op=True)
        if kind == "scatter":
            return reduce_scatter(shard, whole, async_op=True)
        return dist.all_reduce(whole, async_op=True)

    def in_turns(self, kinds: Sequence[str]) -> None:
        """Run collectives one after the other."""
        for number, kind in enumerate(kinds):
            self.begin(kind, number).wait()

    def at_once(self, kinds: Sequence[str]) -> None:
        """Run collectives beside one another."""
        for work in [self.begin(kind, number) for number, kind in enumerate(kinds)]:
            work.wait()


def measured(work: Callable[[], None], size: int, rounds: int) -> tuple[float, float, float]:
    """Seconds of a call, the slowest rank's median, and the tensors that pass a host each way."""
    work()
    dist.barrier()
    before, seconds = passed_bytes(), []
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    dist.barrier()
    received, sent = (
        (now - then) / rounds / size for now, then in zip(passed_bytes(), before, strict=True)
    )
    slowest = torch.tensor(statistics.median(seconds))
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest), sent, received


def rank_job(options: argparse.Namespace) -> None:
    """Measure every case, and write the rows down on the first rank."""
    mesh = merak.init(dp=int(os.environ["WORLD_SIZE"]), device="cpu")
    torch.set_num_threads(1)
    rows = [row for size in options.sizes for row in rows_of(size, options.rounds)]
    if mesh.rank == 0:
        Path(options.folder, "rows.json").write_text(json.dumps(rows))
    dist.barrier()


def rows_of(size: int, rounds: int) -> list[Mapping[str, object]]:
    """Rows of the table for tensors of one size."""
    tensors, rows = Tensors(size), list[Mapping[str, object]]()
    for name, kinds in CASES.items():
        in_turns_s, sent, received = measured(partial(tensors.in_turns, kinds), size, rounds)
        row: dict[str, object] = {"bytes": size, "collectives": name}
        row["in turns ms"] = round(1e3 * in_turns_s, 1)
        if len(kinds) > 1:
            at_once_s, sent, received = measured(partial(tensors.at_once, kinds), size, rounds)
            row["at once ms"] = round(1e3 * at_once_s, 1)
            row["at once ÷ in turns"] = round(at_once_s / in_turns_s, 2)
        rows.append(row | {"a host sends": round(sent, 2), "and receives": round(received, 2)})
    return rows


def parse() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--rate", default="200mbit", help="of the link")
    parser.add_argument("--ranks", type=int, default=2, help="of each host")
    parser.add_argument("--sizes", type=int, nargs="+", default=[400_000, 3_200_000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    if "RANK" in os.environ:
        rank_job(options)
        return
    with tempfile.TemporaryDirectory(prefix="merak-beside-") as folder:
        script = [str(Path(__file__).resolve()), "--folder", folder, "--rounds"]
        script += [str(options.rounds), "--sizes", *map(str, options.sizes)]
        log = Path(folder, "ranks.log")
        with slow_link(options.rate) as network:
            running = [host.torchrun(options.ranks, script, log) for host in network.hosts]
            if any([one.wait(600) for one in running]):
                raise SystemExit(log.read_text(errors="replace")[-4000:])
        rows = json.loads(Path(folder, "rows.json").read_text())
        report.show({"Collectives": rows}, options.json)


if __name__ == "__main__":
    main()
