"""Real ranks for tests: processes that start once and serve every test over gloo on the CPU."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

GRACE_S = 5.0
"""Seconds the other ranks get to end by themselves after one has raised."""

LIMIT_S, SLOW_LIMIT_S = 600.0, 1800.0
"""Seconds after which a job of ranks is ended, of an essential test and of a slow one."""


class RankError(Exception):
    """A rank raised, died or did not come back; the message holds its traceback."""


PRELOADED = (
    "merak.trainer", "merak.check", "torch._dynamo", "torch.distributed", "torch.export._trace",
    "tests.multirank.compare", "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama", "tests.multirank.imported",
)  # fmt: skip
"""What ranks import: once, in a process that they are forked from, which never computes."""


def _way_to_start() -> str:
    """How ranks start, by multiprocessing's name for it; devices do not outlive a fork."""
    import torch

    if sys.platform != "linux" or torch.accelerator.is_available():
        return "spawn"
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOADED))
    return "forkserver"


class RankPool:
    """Processes that run a function on every rank of a fresh process group, again and again.

    A rank that raises may leave its peers waiting inside a collective: then all processes are
    ended, and the next `run` starts new ones.

    Attributes:
        backend: of their process groups.
        limit_s: seconds after which the ranks of a run are ended, unless it says otherwise.
    """

    def __init__(self) -> None:
        self.limit_s = LIMIT_S
        self.backend = os.environ.get("MERAK_TEST_BACKEND", "gloo")  # or `nccl_rules.NAME`
        self._context: Any = multiprocessing.get_context(_way_to_start())
        self._folder = Path(tempfile.mkdtemp(prefix="merak-ranks-"))
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._num_runs = 0

    def run(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: object,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Call `function(*args)` on ranks 0 … world_size − 1, connected with each other.

        The function calls `merak.init` itself if it wants a mesh; mesh and process
        groups are gone after each run. It must be importable: defined at the top of a module.

        Args:
            function: what each rank runs; it and `args` must pickle.
            world_size: the number of ranks.
            args: the same for every rank.
            timeout_s: seconds after which the ranks are ended; None for `limit_s`.

        Returns:
            What each rank returned, in rank order.

        Raises:
            RankError: a rank raised, died or was too slow.
        """
        test = os.environ.get("PYTEST_CURRENT_TEST", "")  # for `tests/causes.py`
        self._start(world_size)
        self._num_runs += 1
        store = self._folder / f"store{self._num_runs}"
        connections = [connection for _, connection in self._workers[:world_size]]
        for rank, connection in enumerate(connections):
            job = (function, args, rank, world_size, str(store), self.backend, test)
            connection.send_bytes(pickle.dumps(job))
        results = self._collect(connections, self.limit_s if timeout_s is None else timeout_s)
        store.unlink(missing_ok=True)
        return results

    def close(self) -> None:
        """End the processes."""
        self._stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, world_size: int) -> None:
        while len(self._workers) < world_size:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def _stop(self) -> None:
        for process, connection in self._workers:
            connection.close()
            process.kill()
        for process, _ in self._workers:
            process.join()
        self._workers.clear()

    def _collect(self, connections: Sequence[Connection], timeout_s: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        pending = {connection: rank for rank, connection in enumerate(connections)}
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = pending.pop(connection)
                answer, failure = _receive(connection)
                if failure is None:
                    results[rank] = answer
                    continue
                failures[rank] = failure
                deadline = min(deadline, time.monotonic() + GRACE_S)
        if failures or pending:
            self._stop()
            raise RankError(_describe(failures, sorted(pending.values()), timeout_s))
        return [results[rank] for rank in range(len(connections))]


def _receive(connection: Connection) -> tuple[Any, str | None]:
    try:
        answer, failure = pickle.loads(connection.recv_bytes())
    except (EOFError, ConnectionError):
        return None, "the process died"
    return answer, failure


def _describe(failures: dict[int, str], missing: list[int], timeout_s: float) -> str:
    parts = [f"rank {rank} failed:\n{failure}" for rank, failure in sorted(failures.items())]
    if missing and not failures:
        parts.append(f"ranks {missing} did not come back within {timeout_s:.0f} s")
    elif missing:
        parts.append(f"ranks {missing} were still waiting and have been ended")
    return "\n".join(parts)


def as_script(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make ranks run a function as a user's script, whose reads of shards are refused."""
    vars(function)["is_script"] = True
    return function


@contextmanager
def _reading_shards() -> Iterator[None]:
    """Inside, tests read shards of parameters as Merak itself does."""
    with mock.patch("merak.graph.weights.sharded.is_called_by_merak", lambda *_: True):
        yield


def _serve(connection: Connection) -> None:
    """Run the jobs that come through the pipe, one after another, until it closes."""
    import torch

    from tests import causes, garbage, shared_cache
    from tests.mutations.mutation import apply_named

    torch.set_num_threads(1)
    shared_cache.share()
    shared_cache.share_found()
    apply_named()
    causes.count()
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, ConnectionError):
            return
        garbage.leave_out()
        try:
            answer = pickle.dumps((_run_job(*pickle.loads(message)), None))
        except BaseException:
            answer = pickle.dumps((None, traceback.format_exc()))
        connection.send_bytes(answer)


def _run_job(
    function: Callable[..., Any],
    args: Sequence[Any],
    rank: int,
    world_size: int,
    store: str,
    backend: str,
    test: str,
) -> Any:
    import torch.distributed as dist

    from merak.core import mesh
    from merak.graph.weights import sharded
    from tests import nccl_rules

    os.environ["PYTEST_CURRENT_TEST"] = test
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size))
    nccl_rules.register()
    dist.init_process_group(
        backend, store=dist.FileStore(store, world_size), rank=rank, world_size=world_size
    )
    try:
        of_shards = nullcontext() if getattr(function, "is_script", False) else _reading_shards()
        with nccl_rules.kept(), of_shards:
            return function(*args)
    finally:
        sharded._is_layout_known.clear()
        mesh.reset()
        dist.destroy_process_group()
