"""Causal attention of ranks that share the tokens: around a ring, gathered, and by all-to-alls.

    python benchmarks/ring_attention.py [--tokens 8192] [--kv-heads 2] [--ranks 2]

Three ways of one attention, forward and backward, alternate in one job of ranks over gloo, one
thread each: keys and values pass around a ring; they are gathered, and a mask hides what is later;
all-to-alls give each rank all tokens of some heads. The peak is of the tensors that operators make
on the fullest rank, gradients included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tools import report
from torch.nn import functional

import merak
from merak.core.mesh import current_mesh
from merak.core.storages import Storages
from merak.core.units import size
from merak.ops.attention.ring import Ring, attend_ring
from merak.ops.collectives import gather_with_partial_grad
from merak.ops.context_parallel import exchange_shards

AXIS = "cp"
Way = Callable[..., torch.Tensor]


def ways(options: argparse.Namespace) -> Mapping[str, Way]:
    """Functions of a rank's queries, keys and values."""
    tokens, ranks, how = options.tokens, options.ranks, Ring(None, True, options.ranks, AXIS)
    rank = current_mesh().cp_rank

    def around(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return attend_ring(query, key, value, None, *how)

    def gathered(query: torch.Tensor, *pairs: torch.Tensor) -> torch.Tensor:
        key, value = (gather_with_partial_grad(x, 2, (tokens,), AXIS) for x in pairs)
        own = torch.arange(tokens)[rank * (tokens // ranks) :][: tokens // ranks]
        mask = own[:, None] >= torch.arange(tokens)
        return functional.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)

    def exchanged(*operands: torch.Tensor) -> torch.Tensor:
        by_tokens = (2, (tokens,))
        own = [exchange_shards(x, by_tokens, (1, (x.shape[1],)), AXIS) for x in operands]
        found = functional.scaled_dot_product_attention(*own, is_causal=True, enable_gqa=True)
        return exchange_shards(found, (1, (options.heads,)), by_tokens, AXIS)

    found: dict[str, Way] = {"ring": around, "gathered, with a mask": gathered}
    if options.kv_heads % ranks == 0:
        found["all-to-alls"] = exchanged
    return found


def rank_job(options: argparse.Namespace) -> None:
    """Run all ways in turns; rank 0 writes seconds, peaks, and how far results are apart."""
    merak.init(cp=options.ranks, device="cpu")
    torch.set_num_threads(1)
    torch.manual_seed(current_mesh().cp_rank)
    heads = (options.heads, options.kv_heads, options.kv_heads)
    shapes = [(1, n, options.tokens // options.ranks, options.features) for n in heads]
    dtype = getattr(torch, options.dtype)
    operands = [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]
    given = torch.randn(shapes[0], dtype=dtype)
    found: dict[str, dict[str, Any]] = {}
    first: list[torch.Tensor] = []
    for number in range(options.rounds + 1):
        for name, way in ways(options).items():
            own = found.setdefault(name, {"seconds": []})
            dist.barrier()
            start = time.perf_counter()
            if number:
                torch.autograd.grad(way(*operands), operands, given)
                dist.barrier()
                own["seconds"].append(time.perf_counter() - start)
                continue
            with Storages([*operands, given]) as made:
                made_of = [way(*operands)]
                made_of += torch.autograd.grad(made_of[0], operands, given)
            first = first or [one.detach() for one in made_of]
            pairs = zip(first, made_of, strict=True)
            apart = max(float((a - b.detach()).abs().max()) for a, b in pairs)
            numbers = torch.tensor([made.peak_bytes, apart], dtype=torch.float64)
            dist.all_reduce(numbers, dist.ReduceOp.MAX)
            own["peak"], own["apart"] = numbers.tolist()
    if current_mesh().rank == 0:
        Path(options.folder, "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Print the table."""
    parser = report.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=8192, help="of all ranks")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        rank_job(options)
        return
    with tempfile.TemporaryDirectory(prefix="merak-ring-") as folder:
        run = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
        again = [str(Path(__file__).resolve()), *sys.argv[1:], "--folder", folder]
        done = subprocess.run([sys.executable, *run, *again], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr[-4000:])
        found = json.loads(Path(folder, "found.json").read_text())
    ring = statistics.median(found["ring"]["seconds"])
    rows = [
        {
            "way": name,
            "ms": round(1e3 * statistics.median(own["seconds"])),
            "to the ring": round(statistics.median(own["seconds"]) / ring, 2),
            "peak": size(int(own["peak"])),
            "largest difference": f"{own['apart']:.1e}",
        }
        for name, own in found.items()
    ]
    report.show({"Attention, forward and backward": rows}, options.json)


if __name__ == "__main__":
    main()
