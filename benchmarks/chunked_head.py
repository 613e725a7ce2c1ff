"""A head and its cross entropy, forward and backward: all logits beside chunks of them.

    python benchmarks/chunked_head.py [--tokens 4096] [--chunk 32MiB] [--dtype bfloat16]

Chunks run in one pass, whose forward makes the gradients, and in two. All alternate in one process,
on one core or on a GPU, with a label for every token and for every second one. The peak is of the
tensors that operators make, gradients included.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from tools import report
from torch.nn import functional

from merak.core.storages import Storages
from merak.core.units import read_bytes, size
from merak.ops.chunked_loss import ChunkedHead, chunked_cross_entropy

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
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    how: dict[str, Any] = {"dtype": getattr(torch, args.dtype), "device": args.device}
    x = torch.randn(args.tokens, args.hidden, **how).requires_grad_()
    weight = torch.randn(args.classes, args.hidden, **how).mul_(0.02).requires_grad_()
    rows = max(args.chunk // 4 // args.classes, 1)
    losses = {
        "all logits": whole,
        f"{rows} tokens at a time, one pass": in_chunks(rows, args.classes, True),
        f"{rows} tokens at a time, two passes": in_chunks(rows, args.classes, False),
    }
    table = []
    for labels, every in (("every token", 1), ("every second token", 2)):
        target = torch.full((args.tokens,), -100, device=args.device)
        target[::every] = torch.randint(0, args.classes, target[::every].shape, device=args.device)
        tensors = (x, weight, target)
        seconds: dict[str, list[float]] = {name: [] for name in losses}
        for _ in range(args.rounds + 1):
            for name, loss in losses.items():
                seconds[name].append(step(loss, tensors))
        first = statistics.median(seconds["all logits"][1:])
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
