"""A head and a loss, forward and backward: all logits beside chunks of them.

    python benchmarks/chunked_head.py [--tokens 4096] [--chunk 32MiB] [--loss policy]

Chunks of a cross entropy run in one pass, whose forward makes the gradients, and in two, with a
label for every token and for every second one. A policy's loss reads the log-probability of each
token's label and the entropy of its logits. All alternate in one process, on one core or on a GPU.
The peak is of the tensors that operators make, gradients included.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from tools import report
from torch import nn
from torch.nn import functional

from merak.core.storages import Storages
from merak.core.tensor_meta import TensorMeta
from merak.core.units import read_bytes, size
from merak.graph.chunked_rows import rows_in_chunks
from merak.graph.program.codegen import runnable
from merak.graph.trace.trace import trace
from merak.ops.chunked_loss import ChunkedHead, chunked_cross_entropy
from merak.ops.chunked_rows import RowFunction, chunked_rows

WHOLE = "all logits"

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def whole(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The loss as transformers' models compute it: of all logits, in float32."""
    return functional.cross_entropy(functional.linear(x, weight).float(), target)


def in_chunks(rows: int, classes: int, one_pass: bool) -> Loss:
    """The loss of so many tokens at a time."""
    head = ChunkedHead((("to", torch.float32),), -100, 0.0, (1, classes, ""), rows, one_pass)

    def loss(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return chunked_cross_entropy(x, weight, None, target, None, 1, head)

    return loss


def policy(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss of two numbers of each token, as one writes it by hand."""
    each = functional.linear(x, weight).float().log_softmax(-1)
    entropy = -(each.exp() * each).sum(-1)
    counted = target != -100
    chosen = each.gather(-1, target.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return -((chosen + 0.01 * entropy) * counted).sum() / counted.sum()


class _Policy(nn.Module):
    """The loss, as what is traced has it."""

    def __init__(self, x: torch.Tensor, weight: torch.Tensor) -> None:
        super().__init__()
        self.x, self.weight = nn.Parameter(x), nn.Parameter(weight)

    def forward(self, target: torch.Tensor) -> torch.Tensor:
        return policy(self.x, self.weight, target)


def policy_in_chunks(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, chunk: int
) -> tuple[int, Loss]:
    """Tokens of a chunk, and the loss as the engine runs it."""
    metas = {"target": TensorMeta(tuple(target.shape), target.dtype)}
    graph = rows_in_chunks(trace(_Policy(x.detach(), weight.detach()), metas).graph, chunk)
    assert graph is not None
    names = [node.meta["name"] for node in graph.find_nodes(op="placeholder")]
    run = runnable(graph)

    def loss(*tensors: torch.Tensor) -> torch.Tensor:
        given = dict(zip(("x", "weight", "target"), tensors, strict=True))
        return run(*(given[name] for name in names))[0]

    (node,) = (node for node in graph.nodes if node.target is chunked_rows)
    return RowFunction.first_of(node.args).rows, loss


def step(loss: Loss, tensors: tuple[torch.Tensor, ...]) -> float:
    """Seconds of a forward and backward."""
    x, weight, target = tensors
    start = time.perf_counter()
    torch.autograd.grad(loss(x, weight, target), (x, weight))
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak(loss: Loss, tensors: tuple[torch.Tensor, ...]) -> int:
    """Bytes of the tensors that a step makes."""
    with Storages(tensors) as made:
        step(loss, tensors)
    return made.peak_bytes


def main() -> None:
    """Print the table."""
    parser = report.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--classes", type=int, default=50_257)
    parser.add_argument("--chunk", type=read_bytes, default="32MiB")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--loss", default="cross entropy", choices=("cross entropy", "policy"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    how: dict[str, Any] = {"dtype": getattr(torch, args.dtype), "device": args.device}
    x = torch.randn(args.tokens, args.hidden, **how).requires_grad_()
    weight = torch.randn(args.classes, args.hidden, **how).mul_(0.02).requires_grad_()
    rows = max(args.chunk // 4 // args.classes, 1)
    table = []
    both = (("every token", 1), ("every second token", 2))
    for labels, every in both if args.loss == "cross entropy" else both[:1]:
        target = torch.full((args.tokens,), -100, device=args.device)
        target[::every] = torch.randint(0, args.classes, target[::every].shape, device=args.device)
        if args.loss == "policy":
            own_rows, chunked = policy_in_chunks(x, weight, target, args.chunk)
            losses = {WHOLE: policy, f"{own_rows} tokens at a time": chunked}
        else:
            losses = {
                WHOLE: whole,
                f"{rows} tokens at a time, one pass": in_chunks(rows, args.classes, True),
                f"{rows} tokens at a time, two passes": in_chunks(rows, args.classes, False),
            }
        tensors = (x, weight, target)
        seconds: dict[str, list[float]] = {name: [] for name in losses}
        for _ in range(args.rounds + 1):
            for name, loss in losses.items():
                seconds[name].append(step(loss, tensors))
        first = statistics.median(seconds[WHOLE][1:])
        for name, loss in losses.items():
            own = statistics.median(seconds[name][1:])
            table.append(
                {
                    "labels": labels,
                    "head": name,
                    "ms": round(own * 1e3, 1),
                    "÷ all logits": round(own / first, 2),
                    "peak": size(peak(loss, tensors)),
                }
            )
    gradients = x.nbytes + weight.nbytes
    report.show({f"gradients alone: {size(gradients)}": table}, args.json)


if __name__ == "__main__":
    main()
