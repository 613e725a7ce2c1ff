"""Ranks that a command starts: the result of rank 0, and the first cause of a failure."""

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import merak
from merak.core.doctor.finding import System
from merak.core.errors import (
    CommandError,
    MerakError,
    RunError,
    ShardError,
    TerminatedError,
    TrainingError,
)
from merak.core.health.preemption import TERMINATED
from merak.launch import ranks
from merak.launch.forkserver import FROM_NOTHING
from merak.launch.ranks import Work, run_ranks
from tests.tiers import one_in


@pytest.fixture(autouse=True)
def ranks_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks forked from a server that another test has started write to that test's stderr."""
    monkeypatch.setattr(ranks, "start_method", lambda: FROM_NOTHING)


def add_ranks(offset: int) -> int:
    print("not the result")
    # Workers of data loaders start as in a script, though the rank itself was spawned.
    assert multiprocessing.get_start_method() == multiprocessing.get_all_start_methods()[0]
    dist.init_process_group("gloo")
    total = torch.tensor(offset + dist.get_rank())
    dist.all_reduce(total)
    dist.destroy_process_group()
    return int(total) * 10 + int(os.environ["RANK"])


def test_more_ranks_than_the_memory_has_room_for_are_not_started(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 16777216 kB\n")
    host = System(root=tmp_path)
    ranks.check_room(256, host)
    refused = pytest.raises(
        CommandError, match=r"^257 ranks do not .* 17\.2 GB .* for 256 at most; lo"
    )
    with refused:
        ranks.check_room(257, host)
    with pytest.raises(CommandError, match=r"^1,000,000,000 ranks do not find room on this"):
        run_ranks(Work(add_ranks, (1,)), 10**9)


def fail_on_rank_1(how: str) -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() != 1:
        dist.barrier()  # fails when rank 1 is gone, or waits until this rank is ended
        time.sleep(600)
    if how == "bad input":
        raise ShardError("5 heads cannot be split over tp=2.")
    if how == "training":
        raise TrainingError("step 3 has loss nan.")
    if how == "bug":
        raise RuntimeError("a bug of rank 1")
    if how == "exit":
        sys.exit(7)
    os.kill(os.getpid(), signal.SIGKILL)


def fail_at_first(how: str, folder: str) -> int:
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    Path(folder, f"{restarts}-{os.environ['RANK']}").touch()
    merak.init(dp=2, device="cpu")
    if restarts == 0 and dist.get_rank() == 1:
        if how == "bad input":
            raise ShardError("5 heads cannot be split over tp=2.")
        if how == "failure":
            raise TrainingError("step 3 has loss nan.")
        os.kill(os.getpid(), signal.SIGTERM if how == "terminated" else signal.SIGKILL)
        time.sleep(600)
    dist.barrier()
    return restarts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"),
    [("failure", "step 3 has loss nan."), ("killed", "a rank has ended")],
)
def test_ranks_are_started_again(
    how: str, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_ranks(Work(fail_at_first, (how, str(tmp_path))), 2, max_restarts=2) == 1
    assert f"merak: {said}\n[merak] restart 1 of 2 …" in capfd.readouterr().err


@pytest.mark.slow
def test_bad_input_ends_restarted_ranks_for_good(tmp_path: Path) -> None:
    with pytest.raises(MerakError, match=r"^5 heads cannot be split"):
        run_ranks(Work(fail_at_first, ("bad input", str(tmp_path))), 2, max_restarts=1)
    assert {path.name[0] for path in tmp_path.iterdir()} == {"0"}


@pytest.mark.slow
def test_sigterm_has_an_error_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(TerminatedError, match=r"^SIGTERM has ended the job\.$"):
        run_ranks(Work(fail_at_first, ("terminated", str(tmp_path))), 2)


def test_result_of_rank_0(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_ranks(Work(add_ranks, (5,)), 2) == 110
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.count("not the result") == 2


def listening(launcher: int) -> set[str]:
    """Addresses, but for those of the loopback interface, on which the job's processes listen."""
    merak.init(dp=2, device="cpu")
    dist.all_reduce(torch.ones(1))
    own = addresses(os.getpid()) | addresses(launcher)
    found: list[set[str]] = [set(), set()]
    dist.all_gather_object(found, own)
    return found[0] | found[1]


def addresses(pid: int) -> set[str]:
    links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in links:
                found.add(fields[1].partition(":")[0])
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="/proc says who listens")
def test_no_other_machine_can_reach_the_ranks_of_a_command() -> None:
    assert run_ranks(Work(listening, (os.getpid(),)), 2) == {"0100007F"}  # 127.0.0.1


@pytest.mark.parametrize(
    ("is_bad_input", "kind", "said"),
    [(True, MerakError, "^too many stages"), (False, TerminatedError, "^SIGTERM has ended")],
)
def test_bad_input_is_the_cause_where_a_rank_that_sigterm_has_ended_was_seen_first(
    is_bad_input: bool,
    kind: type[Exception],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    ranks._note(tmp_path, "too many stages; use fewer.", is_bad_input=is_bad_input)
    seen = {rank: ProcessFailure(rank, 1, code, "") for rank, code in enumerate((TERMINATED, 1))}
    seen[1].timestamp = seen[0].timestamp + 1
    with pytest.raises(kind, match=said):
        raise ranks._first_cause(tmp_path, ChildFailedError("job", seen))


@one_in(3)
@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [
        ("bad input", MerakError, r"^5 heads cannot be split over tp=2\.$"),
        ("training", RunError, r"^step 3 has loss nan\.$"),
        ("bug", RunError, r"^rank 1 failed:\nTraceback[\s\S]*RuntimeError: a bug of rank 1$"),
        ("killed", RunError, r"^rank 1 was killed by SIGKILL: by the kernel for its memory"),
        ("exit", RunError, r"^rank 1 failed:\nTraceback[\s\S]*SystemExit: 7$"),
    ],
)
def test_first_cause_once(
    how: str, kind: type[Exception], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(kind, match=said):
        run_ranks(Work(fail_on_rank_1, (how,)), 2)
    captured = capfd.readouterr()
    assert "Traceback" not in captured.out + captured.err
