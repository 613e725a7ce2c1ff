"""An expert block on two ranks: every expert split, whole experts a rank, and a dense block.

The experts are transformers' of Mixtral,
`--k` of `--experts` a token; the dense block's inner width is `k` times an expert's, which gives it
equal FLOPs. In one run, the three alternate in rounds of steps of one microbatch on two ranks over
gloo, on one host or, with `--rate`, on two (network namespaces with a limited rate). What a rank
hands to all-reduces in a step is counted, beside the formula of docs/experts.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from tools import report
from tools.link import slow_link
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

import merak

KINDS = {"dense, tp=2": 1, "experts, tp=2": 1, "experts, tp=2 ep=2": 2}
"""What is measured, and its expert parallel degree."""

BLOCKS = 2


class Around(nn.Module):
    """A weight in front of blocks, so that a gradient leaves them, a narrow head and a loss."""

    def __init__(self, blocks: list[nn.Module], hidden: int) -> None:
        super().__init__()
        self.scale, self.layers = nn.Parameter(torch.ones(hidden)), nn.ModuleList(blocks)
        self.head = nn.Linear(hidden, 8, bias=False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = x * self.scale
        for layer in self.layers:
            x = x + layer(x)
        return {"loss": self.head(x).square().mean()}


def model_of(kind: str, options: argparse.Namespace) -> nn.Module:
    """Blocks with random weights, the same on both ranks."""
    torch.manual_seed(0)
    blocks = [block_of(kind, options) for _ in range(BLOCKS)]
    for parameter in nn.ModuleList(blocks).parameters():
        nn.init.normal_(parameter, std=0.02)
    return Around(blocks, options.hidden).train()


def block_of(kind: str, options: argparse.Namespace) -> nn.Module:
    """The dense block, or experts with a router."""
    sizes = {"hidden_size": options.hidden, "intermediate_size": options.inner}
    if kind.startswith("dense"):
        sizes["intermediate_size"] *= options.k
        return LlamaMLP(transformers.LlamaConfig(**sizes))
    config = transformers.MixtralConfig(
        **sizes, num_local_experts=options.experts, num_experts_per_tok=options.k
    )
    config._experts_implementation = "grouped_mm"
    return MixtralSparseMoeBlock(config)


def expected(kind: str, options: argparse.Namespace) -> int:
    """Bytes of the all-reduces, by the formula of docs/experts.md."""
    activation = options.tokens * options.hidden * 4
    router = 0 if kind.startswith("dense") else options.hidden * options.experts * 4
    return BLOCKS * (2 * activation + router)


@contextmanager
def counted(sent: Counter[int]) -> Iterator[None]:
    """Count the bytes of tensors that all-reduces get, by size."""
    run = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent[tensor.nbytes] += 1
        return run(tensor, *args, **kwargs)

    with mock.patch.object(dist, "all_reduce", all_reduce):
        yield


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Optimizer without a state, whose update takes next to nothing."""
    return torch.optim.SGD(parameters, lr=1e-4)


def rank_job(options: argparse.Namespace) -> None:
    """Train one of the three; rank 0 writes what was found."""
    kind = options.job
    mesh = merak.init(tp=2, ep=KINDS[kind], device="cpu")
    torch.set_num_threads(1)
    torch.manual_seed(1)
    batch = {"x": torch.randn(1, options.tokens, options.hidden)}
    model = merak.parallelize(
        model_of(kind, options), batch, optimizer=sgd, num_microbatches=1, max_grad_norm=None
    )
    sent: Counter[int] = Counter()
    seconds: list[float] = []
    for step in range(options.warmup + options.steps):
        dist.barrier()
        start = time.perf_counter()
        with counted(sent) if step == 0 else nullcontext():
            model.step(batch)
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    if mesh.rank == 0:
        found = {"seconds": seconds[options.warmup :], "sent": sent}
        Path(options.folder, "found.json").write_text(json.dumps(found))
    dist.barrier()


def measure(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run both ranks with torchrun, on this host or on two."""
    script = [str(Path(__file__).resolve()), "--job", kind]
    for name in ("folder", "tokens", "hidden", "inner", "experts", "k", "steps", "warmup"):
        script += [f"--{name}", str(getattr(options, name))]
    log = Path(options.folder, "ranks.log")
    if options.network is None:
        run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *script]
        with log.open("ab") as out:
            running = [subprocess.Popen([sys.executable, *run], stdout=out, stderr=out)]
    else:
        running = [host.torchrun(1, script, log) for host in options.network.hosts]
    if any([one.wait(options.patience) for one in running]):
        raise SystemExit(log.read_text(errors="replace")[-4000:])
    found: dict[str, Any] = json.loads(Path(options.folder, "found.json").read_text())
    return found


def compare(options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Rounds of all three, and the medians."""
    found: dict[str, dict[str, Any]] = {}
    for _ in range(options.rounds):
        for kind in KINDS:
            own = measure(kind, options)
            found.setdefault(kind, {"seconds": []})["seconds"] += own["seconds"]
            found[kind]["sent"] = own["sent"]
    for own in found.values():
        own["seconds"] = statistics.median(own["seconds"])
    return table(found, options)


def table(found: dict[str, Any], options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """One row a block; all-reduces of few numbers, as of the loss, are left out."""
    rows = []
    dense_s = found["dense, tp=2"]["seconds"]
    for kind, own in found.items():
        sizes = {int(size): count for size, count in own["sent"].items() if int(size) > 1024}
        rows.append(
            {
                "block": kind,
                "ms": round(1e3 * own["seconds"]),
                "to dense": round(own["seconds"] / dense_s, 2),
                "all-reduces": " + ".join(f"{n} × {s:,}" for s, n in sorted(sizes.items())),
                "bytes": sum(size * count for size, count in sizes.items()),
                "formula": expected(kind, options),
            }
        )
    return {"Blocks": rows}


def parse() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--inner", type=int, default=1024, help="an expert's inner width")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--k", type=int, default=2, help="experts a token")
    parser.add_argument("--rounds", type=int, default=3, help="of the three blocks in turn")
    parser.add_argument("--steps", type=int, default=5, help="steps of a round")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--rate", help="of the network of two hosts, such as 200mbit; one host")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds at most")
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    parser.add_argument("--job", choices=tuple(KINDS), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.job:
        rank_job(options)
        return
    with tempfile.TemporaryDirectory(prefix="merak-experts-") as folder:
        options.folder = folder
        with slow_link(options.rate) as options.network:
            report.show(compare(options), options.json)


if __name__ == "__main__":
    main()
