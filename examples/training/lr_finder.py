"""A learning rate finder: the loss over rates that grow from step to step; then all as before.

torchrun --nproc-per-node 2 examples/training/lr_finder.py --pp 2
"""

import argparse
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

import merak

WIDTH, SAMPLES = 16, 32


class Regression(nn.Module):
    """A small network with its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return {"loss": (x - labels).square().mean()}


def batches() -> Iterator[dict[str, torch.Tensor]]:
    """Batches without end."""
    generator = torch.Generator().manual_seed(1)
    while True:
        x = torch.randn(SAMPLES, WIDTH, generator=generator)
        yield {"x": x, "labels": x.flip(-1)}


def set_rate(parallel: merak.ParallelModel, rate: float) -> None:
    """Set the learning rate; every rank does, and one without parameters has no optimizer."""
    if parallel.optimizer is not None:
        for group in parallel.optimizer.param_groups:
            group["lr"] = rate


def losses_over_rates(
    parallel: merak.ParallelModel, rates: list[float], folder: Path
) -> list[float]:
    """The loss of a step at each rate; parameters and optimizer are then what they were.

    Args:
        parallel: of `merak.parallelize`.
        rates: the learning rates, growing.
        folder: for a checkpoint, seen by all ranks.
    """
    parallel.save_checkpoint(folder)
    losses: list[float] = []
    for rate, batch in zip(rates, batches(), strict=False):
        set_rate(parallel, rate)
        losses.append(parallel.step(batch).item())  # the same on every rank
        if losses[-1] > 4 * min(losses):
            break
    parallel.load_checkpoint(folder)
    return losses


def steepest(rates: list[float], losses: list[float]) -> float:
    """The rate at which the loss falls fastest."""
    falls = [after - before for before, after in pairwise(losses)]
    return rates[falls.index(min(falls))]


def train(num_rates: int, num_steps: int, folder: str) -> tuple[list[float], list[float]]:
    """Losses of the finder, and of the training behind it."""
    parallel = merak.parallelize(
        Regression(),
        next(batches()),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
        num_microbatches=4,
    )
    rates = [1e-3 * 10 ** (4 * n / (num_rates - 1)) for n in range(num_rates)]
    found = losses_over_rates(parallel, rates, Path(folder, "before"))
    set_rate(parallel, steepest(rates, found))
    return found, [parallel.step(b).item() for b, _ in zip(batches(), range(num_steps))]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for axis in ("dp", "tp", "pp"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    parser.add_argument("--folder", default="runs/lr-finder", help="seen by all ranks")
    options = parser.parse_args()
    mesh = merak.init(options.dp, options.tp, options.pp)
    found, losses = train(20, 40, options.folder)
    if mesh.rank == 0:
        print(
            f"rates up to a loss of {found[-1]:.3f}; then from {losses[0]:.3f} to {losses[-1]:.3f}"
        )
