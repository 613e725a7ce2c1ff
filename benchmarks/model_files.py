"""A Hugging Face folder from four ranks: shared files against all of them through rank 0, in turn.

A Llama of 203 million float32 parameters (813 MB) lies on 4 ranks: tp 2 × pp 2, dp 2 × tp 2, or
dp 4. Through rank 0, it receives every shard, one after the other, and writes file by file, as
Merak did before; it is measured with and without syncing each file to disk, which it did not do.
Shared, every file is written by one rank that holds most of it, synced, and compared with its plan.
The files are the same. Times are of the slowest rank, medians over rounds; the three alternate. The
megabytes that ranks send, and that the rank with most of them writes, depend on no machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from safetensors.torch import save_file
from tools import report
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import merak
from merak.checkpoint.model_files import ModelFiles, plan_model_files
from merak.checkpoint.save_pretrained import save_pretrained
from merak.core.mesh import Mesh
from merak.core.shards import ParameterShard, join, take
from merak.graph.weights.holders import TensorHolders, find_holders, shard_shape

LAYOUTS = {"tp 2 × pp 2": (1, 2, 2), "dp 2 × tp 2": (2, 2, 1), "dp 4": (4, 1, 1)}
NUM_RANKS, LAYERS = 4, 12
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 16, "num_hidden_layers": LAYERS}


def build(mesh: Mesh, hidden: int) -> tuple[nn.Module, list[str], dict[str, ParameterShard]]:
    """The model with this rank's stage and shards alone."""
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": 11 * hidden // 4, "vocab_size": 24000}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **HEADS))  # type: ignore[arg-type]
    held, shards = [], {}
    for name, parameter in model.named_parameters():
        number = name.split(".")[2] if ".layers." in name else None
        last = int(number) >= LAYERS // 2 if number else "embed" not in name
        if mesh.pp > 1 and mesh.pp_rank != int(last):
            parameter.data = torch.empty(0)
            continue
        held.append(name)
        if mesh.tp > 1 and parameter.dim() == 2:
            dim = int(any(word in name for word in ("o_proj", "down_proj")))
            shards[name] = ParameterShard(dim, (parameter.shape[dim],), mesh.tp)
            parameter.data = take(parameter.data, shards[name], mesh.tp_rank)
    return model, held, shards


def through_rank0(
    model: nn.Module,
    holdings: Mapping[str, TensorHolders],
    files: Mapping[str, tuple[str, ...]],
    folder: Path,
    synced: bool,
) -> None:
    """Gather every tensor on rank 0, which writes file by file."""
    rank = dist.get_rank()
    tensors = dict(model.named_parameters())
    if rank == 0:
        folder.mkdir()
    for file, names in files.items():
        state = {}
        for name in names:
            parts = [part(tensors[name].detach(), holdings[name], r) for r in holdings[name].ranks]
            shard = holdings[name].shard
            if rank == 0:
                state[name] = parts[0] if shard is None else join(parts, shard)
        if rank == 0:
            save_file(state, folder / file, metadata={"format": "pt"})
            if synced:
                with open(folder / file, "rb") as written:
                    os.fsync(written.fileno())
    dist.barrier()


def part(own: torch.Tensor, holders: TensorHolders, source: int) -> torch.Tensor:
    """A rank's shard on rank 0; anything elsewhere."""
    rank = dist.get_rank()
    if rank == source != 0:
        dist.send(own.contiguous(), dst=0)
    elif rank == 0 != source:
        shape = shard_shape(holders.shape, holders.shard, holders.ranks.index(source))
        received = torch.empty(shape, dtype=holders.dtype)
        dist.recv(received, src=source)
        return received
    return own


def timed(save: Callable[[Path], None], folder: Path) -> tuple[float, dict[str, str]]:
    """Seconds until all ranks are done, and digests of the files; the folder is removed."""
    dist.barrier()
    start = time.perf_counter()
    save(folder)
    dist.barrier()
    seconds = time.perf_counter() - start
    digests = {}
    if dist.get_rank() == 0:
        for path in sorted(folder.glob("*.safetensors")):
            digests[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.rmtree(folder)
        os.sync()
    dist.barrier()
    return seconds, digests


def measure(rank: int, layout: tuple[int, int, int], place: str, options: Any) -> None:
    """One rank: all ways to save, in turn; rank 0 writes the seconds down."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(options.port)}
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    mesh = merak.init(*layout, device="cpu")
    model, held, shards = build(mesh, options.hidden)
    holdings = find_holders(model, held, shards, mesh)
    plan = plan_model_files(model, holdings, mesh, options.max_shard_size)
    old = partial(through_rank0, model, holdings, plan.files)
    ways: dict[str, Callable[[Path], None]] = {
        "rank 0": partial(old, synced=False),
        "rank 0, synced": partial(old, synced=True),
        "shared": partial(_shared, model, held, shards, mesh, options.max_shard_size),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(options.rounds + 1):
        digests = []
        for way, save in ways.items():
            taken, found = timed(save, Path(place, "out"))
            digests.append(found)
            if number:  # the first round warms up
                seconds[way].append(taken)
        assert all(found == digests[0] for found in digests), "the files differ"
    if rank == 0:
        counts = {"files": len(plan.files), "writers": len(set(plan.writers.values()))}
        found = {"seconds": seconds, "counts": counts | traffic(plan)}
        Path(place, "found.json").write_text(json.dumps(found))
    dist.barrier()


def traffic(plan: ModelFiles) -> dict[str, str]:
    """Megabytes that are sent, and that one rank writes: through rank 0, and shared."""
    old = new = 0
    for step in plan.steps:
        for name in step.sources:
            own = plan.held[name]
            sizes = [own.shard_meta(n).num_bytes for n in range(len(own.holders.ranks))]
            old += sum(size for size, rank in zip(sizes, own.holders.ranks) if rank != 0)
            senders = own.senders(step.writer, plan.mesh)
            new += sum(size for size, rank in zip(sizes, senders) if rank != step.writer)
    written: Counter[int] = Counter()
    for file, keys in plan.files.items():
        written[plan.writers[file]] += sum(plan.tensors[key].meta.num_bytes for key in keys)
    most = (written.total(), max(written.values()))
    return {
        "MB sent": f"{old / 1e6:.0f} → {new / 1e6:.0f}",
        "most MB of a rank": " → ".join(f"{num_bytes / 1e6:.0f}" for num_bytes in most),
    }


def _shared(
    model: nn.Module,
    held: list[str],
    shards: Mapping[str, ParameterShard],
    mesh: Mesh,
    size: str,
    folder: Path,
) -> None:
    save_pretrained(model, held, shards, mesh, folder, size)


def run_layout(name: str, options: Any) -> dict[str, Any]:
    """A line of the table, from fresh ranks."""
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        mp.spawn(measure, args=(LAYOUTS[name], place, options), nprocs=NUM_RANKS)
        found = json.loads(Path(place, "found.json").read_text())
    seconds = found["seconds"]
    ratios = {
        way: [old / new for old, new in zip(seconds[way], seconds["shared"], strict=True)]
        for way in ("rank 0", "rank 0, synced")
    }
    return {
        "layout": name,
        **found["counts"],
        **{f"{way} s": statistics.median(taken) for way, taken in seconds.items()},
        "rank 0 / shared": statistics.median(ratios["rank 0"]),
        "rank 0, synced / shared": statistics.median(ratios["rank 0, synced"]),
        "ratios": " … ".join(f"{edge(ratios['rank 0, synced']):.2f}" for edge in (min, max)),
    }


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--max-shard-size", default="200MB", help="the most that a file holds")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=1024, help="a multiple of 16")
    parser.add_argument("--folder", default=None, help="where to write; a temporary folder")
    parser.add_argument("--port", type=int, default=29573)
    options = parser.parse_args()
    rows = [run_layout(name, options) for name in options.layouts]
    report.show({"A Hugging Face folder from 4 ranks": rows}, options.json)


if __name__ == "__main__":
    main()
