"""Jobs in which one rank stalls, for a fork server: what each rank says goes to a file of its own.

Rank 1 stalls, unless a case says otherwise, after a first step that goes well.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import merak
from merak.checkpoint.saver import save_state
from merak.checkpoint.state import RankState
from merak.checkpoint.storage import CheckpointWriter
from merak.core.health import failure, watchdog
from merak.engine import build  # noqa: F401  # imported once, before ranks are forked
from merak.parallel import ParallelModel

LIMIT_S = 5.0
FOLDER: list[Path] = []


def run(case: str, rank: int, num_ranks: int, port: int, folder: str) -> None:
    """One rank of a job; ends with exit code 0 if nothing ends it before."""
    said = os.open(Path(folder, f"rank{rank}"), os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    FOLDER.append(Path(folder))
    watchdog.GRACE_S = 4.0
    failure.LAUNCHER_S = 2.0 * LIMIT_S  # longer than the watch's patience
    try:
        CASES[case]()
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]  # as a script would end
        os._exit(1)


class Model(nn.Module):
    """A chain of blocks between an embedding and a head of the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = hidden + torch.relu(block(hidden))
        scores = hidden @ self.embedding.weight.T
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


BATCH = {"ids": torch.arange(16).view(4, 4), "labels": torch.arange(16).view(4, 4)}


def trained(pp: int, dp: int = 1) -> ParallelModel:
    """A job after its first step."""
    merak.init(pp=pp, dp=dp, device="cpu")
    model = merak.parallelize(
        Model(), BATCH, num_microbatches=2, max_grad_norm=1.0, hang_limit_s=LIMIT_S
    )
    model.step(BATCH)
    return model


def is_rank(rank: int) -> bool:
    return os.environ["RANK"] == str(rank)


def late(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, called by a rank that has stalled for long."""

    def called(*args: Any, **kwargs: Any) -> Any:
        time.sleep(300)
        return function(*args, **kwargs)

    return called


def data() -> None:
    model = trained(pp=3)
    if is_rank(1):
        time.sleep(300)  # its data are slow
    model.step(BATCH)


def forward() -> None:
    model = trained(pp=3)
    stage = next(iter(model.engine._state.stages.values()))
    if is_rank(1):
        stage.forward = late(stage.forward)
    model.step(BATCH)


def gradients() -> None:
    model = trained(pp=1, dp=2)
    reducer = model.engine._state.reducer
    if is_rank(1):
        reducer.ready = late(reducer.ready)
    model.step(BATCH)


def tied() -> None:
    model = trained(pp=2)
    exchange = model.engine._state.tied
    if is_rank(0):  # which owns the tied weight
        exchange.finish = late(exchange.finish)
    model.step(BATCH)


def loss() -> None:
    model = trained(pp=2)
    transfers = model.engine._state.transfers
    if is_rank(1):
        transfers.finish = late(transfers.finish)
    model.step(BATCH)


def send() -> None:
    model = trained(pp=2)
    if is_rank(1):
        time.sleep(300)
    model.evaluate(BATCH)


def stopped() -> None:
    model = trained(pp=3)
    if is_rank(1):
        os.kill(os.getpid(), signal.SIGSTOP)
    model.step(BATCH)


def dead() -> None:
    model = trained(pp=3)
    if is_rank(1):
        os.kill(os.getpid(), signal.SIGKILL)
    model.step(BATCH)


def store_stopped() -> None:
    model = trained(pp=2)
    if is_rank(0):
        os.kill(os.getpid(), signal.SIGSTOP)
    model.step(BATCH)


class Once:
    """A call that is made once: a trace that is made again finds what it has changed."""

    __slots__ = ("_call", "_lock")

    def __init__(self, call: Callable[[], None]) -> None:
        self._call, self._lock = call, threading.Lock()

    def __call__(self) -> None:
        if self._lock.acquire(blocking=False):
            self._call()


class StallsAlone(Model):
    """A model whose forward stalls on rank 1, as it is traced."""

    def __init__(self, stall: Callable[[], None]) -> None:
        super().__init__()
        self.stall = Once(stall)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if is_rank(1):
            self.stall()
        return super().forward(ids, labels)


def traced(stall: Callable[[], None]) -> None:
    merak.init(pp=2, device="cpu")
    model = merak.parallelize(StallsAlone(stall), BATCH, num_microbatches=2, hang_limit_s=LIMIT_S)
    model.step(BATCH)


def stop() -> None:
    time.sleep(LIMIT_S / 2)  # for heartbeats to tell what it does
    os.kill(os.getpid(), signal.SIGSTOP)


def joining() -> None:
    if is_rank(1):
        time.sleep(300)
    merak.init(pp=2, device="cpu", timeout_s=LIMIT_S)


def stopped_in_init() -> None:
    dist = torch.distributed.distributed_c10d
    if is_rank(1):
        before = dist.init_process_group
        dist.init_process_group = lambda *args, **kwargs: (
            stop(), before(*args, **kwargs),
        )  # fmt: skip
        torch.distributed.init_process_group = dist.init_process_group
    merak.init(pp=2, device="cpu", timeout_s=LIMIT_S)


def stopped_tracing() -> None:
    traced(stop)


def stuck_tracing() -> None:
    traced(lambda: time.sleep(300))


def slow_tracing() -> None:
    """A rank that traces for longer than the limit while its heart beats."""
    traced(lambda: time.sleep(1.5 * LIMIT_S))


def stopped_saving() -> None:
    saved(stop)


def stuck_saving() -> None:
    saved(lambda: time.sleep(300))


def saved(stall: Callable[[], None]) -> None:
    model = trained(pp=2)
    engine = model.engine
    if is_rank(1):
        write = CheckpointWriter.write_data
        CheckpointWriter.write_data = lambda *args: (stall(), write(*args))[1]
    held, shards = engine.held(), engine.shards
    save_state(FOLDER[0] / "saved", RankState(model.model, None, held, shards, engine.mesh))


def unreachable() -> None:
    """All ranks live, and one finds its connection lost."""
    model = trained(pp=2)
    if is_rank(0):
        raise torch.distributed.DistBackendError("Connection reset by peer [10.0.0.7]:31337")
    model.step(BATCH)


def patient() -> None:
    """A rank that is late by less than the limit, and one that is late where nobody waits."""
    model = trained(pp=2)
    if is_rank(1):
        time.sleep(LIMIT_S / 4)
    model.step(BATCH)
    time.sleep(1.5 * LIMIT_S)
    model.step(BATCH)


CASES: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (
        data, forward, gradients, tied, loss, send, stopped, dead, store_stopped, patient,
        joining, stopped_in_init, stopped_tracing, stuck_tracing, slow_tracing, stopped_saving,
        stuck_saving, unreachable,
    )
}  # fmt: skip
