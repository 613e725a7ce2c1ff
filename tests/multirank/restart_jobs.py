"""A job for torchrun whose ranks fail once, on its first attempt: `restart_jobs.py RANK FOLDER`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import merak


class Model(nn.Module):
    """A chain of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return nn.functional.mse_loss(x, y)


def main(failing: str, folder: Path) -> None:
    rank, restarts = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    merak.init(pp=2, device="cpu", timeout_s=120)
    batch = {"x": torch.ones(4, 8), "y": torch.ones(4, 8)}
    model = merak.parallelize(Model(), batch, num_microbatches=2, hang_limit_s=120)
    model.step(batch)
    flag = folder / "has failed"
    if rank == failing and not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    model.step(batch)
    # Not printed: lines of several processes in one pipe may mix.
    (folder / f"rank {rank} restarts {restarts}").touch()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
