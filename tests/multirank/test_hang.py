"""A rank that stalls: every rank says where it stands, one gives the reason, and the job ends."""

from __future__ import annotations

import multiprocessing
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.multirank import stalled_jobs
from tests.multirank.test_bad_input_jobs import run as run_torchrun
from tests.tiers import slow

PATIENCE_S = 300.0


@dataclass(frozen=True)
class Ended:
    """How the ranks of a job ended: exit codes, None where one had not; and what each said."""

    codes: list[int | None]
    said: list[str]

    def reasons(self) -> list[str]:
        """The lines that give the reason, over all ranks."""
        lines = [line for told in self.said for line in told.splitlines()]
        return [line for line in lines if "; the job ends." in line]


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Ended]:
    def start(case: str, num_ranks: int, stopped: int | None = None) -> Ended:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([stalled_jobs.__name__])
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            port = listening.getsockname()[1]
        processes = [
            context.Process(target=stalled_jobs.run, args=(case, r, num_ranks, port, str(tmp_path)))
            for r in range(num_ranks)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + PATIENCE_S
        for rank, process in enumerate(processes):
            process.join(0 if rank == stopped else max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
            process.join()
        return Ended(codes, [(tmp_path / f"rank{r}").read_text() for r in range(num_ranks)])

    return start


@pytest.mark.parametrize(
    "case,expected",
    [
        (
            "data",
            [
                r"at 0B0 \(stage 0, backward, microbatch 0\) of step 1 and has waited [\d.]+ s for "
                r"the gradient of microbatch 0 of stage 1 from rank 1 \[",
                r"outside the engine's steps for [\d.]+ s and waits for nobody "
                r"\[.*stalled_jobs\.py:\d+\]$",
                r"at 2F0 \(stage 2, forward, microbatch 0\) of step 1 and has waited [\d.]+ s for "
                r"the activation of microbatch 0 of stage 1 from rank 1 \[",
            ],
        ),
        slow(
            "forward",
            [
                r"the gradient of microbatch 0 of stage 1 from rank 1 \[",
                r"at 1F0 \(stage 1, forward, microbatch 0\) of step 1 and has computed for [\d.]+",
                r"the activation of microbatch 0 of stage 1 from rank 1 \[",
            ],
        ),
        slow(
            "gradients",
            [
                r"in step 1 and has waited [\d.]+ s for the sum of the gradients of stage 0 with "
                r"rank 1 \[",
                r"at 0B1 \(stage 0, backward, microbatch 1\) of step 1 and has computed",
            ],
        ),
        slow(
            "tied",
            [
                r"in step 1 and has worked for [\d.]+ s, without a wait of its own",
                r"the gradient of tied embedding\.weight from rank 0 \[",
            ],
        ),
        slow(
            "loss",
            [
                r"in step 1 and has waited [\d.]+ s for the sum of losses over pp with rank 1 \[",
                "in step 1 and has worked",
            ],
        ),
        slow(
            "send",
            [
                r"in an evaluation and has waited [\d.]+ s for the activation of microbatch 0 of "
                r"stage 0 to be taken by rank 1 \[",
                "outside the engine's steps",
            ],
        ),
    ],
)
def test_every_rank_says_where_it_stands(
    job: Callable[..., Ended], case: str, expected: list[str]
) -> None:
    ended = job(case, len(expected))
    assert ended.codes == [1] * len(expected), ended.said
    for rank, (said, pattern) in enumerate(zip(ended.said, expected, strict=True)):
        lines = re.findall(rf"^merak: rank {rank} \(pp .*", said, flags=re.MULTILINE)
        assert len(lines) == 1, said
        assert re.search(pattern, lines[0]), lines[0]
    assert len(ended.reasons()) == 1, ended.reasons()
    (reason,) = ended.reasons()
    assert "the job ends" in reason
    assert "Without an answer" not in reason


@pytest.mark.slow
def test_a_stopped_rank_is_named(job: Callable[..., Ended]) -> None:
    ended = job("stopped", 3, stopped=1)
    assert ended.codes == [1, None, 1], ended.said
    assert "from rank 1" in ended.said[0]
    assert "from rank 1" in ended.said[2]
    assert len(ended.reasons()) == 1, ended.reasons()
    (reason,) = ended.reasons()
    assert re.search(
        r"Without an answer: rank 1 \(process \d+ on .+\) is stopped, as by SIGSTOP, .*; \d+ s ago "
        r"it said that it (stands|is|has) ",
        reason,
    ), reason


@pytest.mark.slow
def test_a_rank_that_died_ends_the_others(job: Callable[..., Ended]) -> None:
    ended = job("dead", 3)
    assert ended.codes[1] == -signal.SIGKILL
    assert None not in ended.codes and 0 not in ended.codes, ended.said
    lost = re.findall(
        r"merak: rank 1 \(process \d+ on .+?\) (?:was killed by SIGKILL|has ended without a word).*"
        r"; so rank \d cannot go on",
        "".join(ended.said),
    )
    # Rank 0 keeps the store here: a rank that would ask it after rank 0 has ended speaks as well.
    told = [*lost, *ended.reasons()]
    assert told and all("rank 1 (process" in line for line in told), ended.said


@pytest.mark.slow
def test_a_rank_speaks_though_the_store_has_stopped(job: Callable[..., Ended]) -> None:
    ended = job("store_stopped", 2, stopped=0)
    assert ended.codes == [None, 1], ended.said
    assert "the activation of microbatch 0 of stage 0 from rank 0" in ended.said[1]
    assert len(ended.reasons()) == 1, ended.reasons()
    (reason,) = ended.reasons()
    assert re.search(r"the job's store at 127\.0\.0\.1:\d+ does not answer: the process", reason)
    assert re.search(r"rank 0 \(process \d+ on .+\) is stopped", reason)


@pytest.mark.slow
def test_a_rank_that_is_late_by_less_ends_nothing(job: Callable[..., Ended]) -> None:
    ended = job("patient", 2)
    assert ended.codes == [0, 0], ended.said
    assert ended.said == ["", ""]


@pytest.mark.parametrize(
    "case,waits,fate",
    [
        slow(
            "joining",
            r"rank 0 has waited [\d.]+ s for the connection to rank 1, and timeout_s=5; the job",
            r"rank 1 has not been heard of: merak\.init was not called there, or its host cannot",
        ),
        slow(
            "stopped_in_init",
            r"rank 0 has waited [\d.]+ s for the connection to rank 1, and timeout_s=5; the job",
            r"rank 1 \(process \d+ on .+\) is stopped, .* ago it said that it has waited",
        ),
        slow(
            "stopped_tracing",
            r"rank 0 has (waited [\d.]+ s for .* rank 1|found a rank that says nothing), and "
            r"hang_limit_s=5; the job ends",
            r"rank 1 \(process \d+ on .+\) is stopped, .* ago it said that it is tracing the model",
        ),
        slow(
            "stopped_saving",
            r"rank 0 has (waited [\d.]+ s for .* rank 1|found a rank that says nothing), and "
            r"hang_limit_s=5; the job ends",
            r"rank 1 \(process \d+ on .+\) is stopped, .* ago it said that it is writing parameter",
        ),
    ],
)
def test_a_rank_that_stalls_outside_the_engine_is_named(
    job: Callable[..., Ended], case: str, waits: str, fate: str
) -> None:
    ended = job(case, 2, stopped=1)
    assert ended.codes == [1, None], ended.said
    assert len(ended.reasons()) == 1, ended.reasons()
    (reason,) = ended.reasons()
    assert re.search(waits, reason), reason
    assert re.search(fate, reason), reason


@pytest.mark.slow
@pytest.mark.parametrize(
    "case,doing",
    [
        ("stuck_tracing", "is tracing the model for"),
        ("stuck_saving", "is writing parameters and optimizer of saved for"),
    ],
)
def test_patience_with_a_rank_whose_heart_beats_ends(
    job: Callable[..., Ended], case: str, doing: str
) -> None:
    ended = job(case, 2)
    assert ended.codes == [1, 1], ended.said
    line = re.search(r"^merak: rank 1 \(pp .*", ended.said[1], flags=re.MULTILINE)
    assert line and doing in line[0], ended.said[1]
    for_s = re.search(r"for ([\d.]+) s and waits for nobody", line[0])
    assert for_s and float(for_s[1]) > 2 * stalled_jobs.LIMIT_S, line[0]


@pytest.mark.slow
def test_others_have_patience_with_a_rank_that_traces(job: Callable[..., Ended]) -> None:
    ended = job("slow_tracing", 2)
    assert ended.codes == [0, 0], ended.said
    assert ended.said == ["", ""]


@pytest.mark.slow
def test_ranks_that_live_but_cannot_reach_one_another(job: Callable[..., Ended]) -> None:
    ended = job("unreachable", 2)
    assert ended.codes[0] == 1
    assert re.search(
        r"merak: rank 0 has lost the connection to another rank \(Connection reset by peer "
        r"\[10\.0\.0\.7\]:31337\)\. The ranks live but cannot reach one another at .* set "
        r"GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME( \(now .*\))? to the interface that joins "
        r"the hosts",
        ended.said[0],
    ), ended.said


@pytest.mark.slow
def test_slow_data_end_a_torchrun_job_of_the_trainer(tmp_path: Path) -> None:
    ended = run_torchrun("stalled", tmp_path)
    assert ended.code != 0
    assert re.search(r"rank 0 .* outside the engine's steps .*bad_jobs\.py:\d+\]", ended.said)
    assert re.search(r"rank 1 .* has waited .* for what batches there are on rank 0", ended.said)
    assert ended.said.count("hang_limit_s=6; the job ends. Waiting for nobody: rank 0.") == 1
    assert "told in its own output" in ended.report


def test_a_watch_is_seen_out_before_python_ends() -> None:
    """A thread in torch's own code when Python ends would abort the process."""
    command = [sys.executable, "-c", BUSY_IN_THE_STORE]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 0, ended.stderr


BUSY_IN_THE_STORE = """
import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from merak.core.health import store as job_store, watchdog

store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)


class SlowStore:
    def __getattr__(self, name):
        return lambda *_: None

    def check(self, keys):
        with suppress(dist.DistStoreError):
            store.wait(["nobody sets this"], timedelta(milliseconds=5))
        return False


job_store.connect = SlowStore
watchdog.start(watchdog.Member(0, 1, "alone"), watchdog.Limit("hang_limit_s", 0.01))
time.sleep(0.1)
"""
