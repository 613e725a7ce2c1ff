"""Heartbeats, and what becomes of ranks whose heart has stopped, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from merak.core.health import heartbeat
from merak.core.health.heartbeat import Heartbeat, Peers, ended, own_heartbeat
from merak.core.health.timeouts import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc says what a process does")


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    yield process
    process.kill()
    process.wait()


def state_of(pid: int) -> str:
    return heartbeat._process(pid)[0]


def until_state(pid: int, states: str) -> None:
    assert until(lambda: state_of(pid) in states, 60.0)


def beat_of(pid: int) -> Heartbeat:
    started = heartbeat._process(pid)[1]
    return replace(own_heartbeat(), pid=pid, started=started, doing="is tracing the model")


def peers_of(*beats: Heartbeat | None) -> Peers:
    store = dist.HashStore()
    for rank, beat in enumerate(beats):
        if beat is not None:
            beat.write(store, rank)
    peers = Peers(len(beats))
    peers.read(store)
    return peers


def test_a_killed_rank_is_told_from_a_stopped_one(child: subprocess.Popen[bytes]) -> None:
    beat = beat_of(child.pid)
    peers = peers_of(own_heartbeat(), beat)
    assert peers.fates([0, 1]) == {}
    assert "lives, but says nothing for" in peers.describe(1, {})
    child.send_signal(signal.SIGSTOP)
    until_state(child.pid, "T")
    fates = peers.fates([0, 1])
    assert list(fates) == [1]
    said = peers.describe(1, fates)
    assert f"rank 1 (process {child.pid} on {beat.host}) is stopped, as by SIGSTOP" in said
    assert said.endswith("s ago it said that it is tracing the model")
    child.kill()
    until_state(child.pid, "Z")
    assert "was killed by SIGKILL, perhaps by the kernel for its memory" in peers.fates([1])[1]
    child.wait()
    assert "has ended without a word" in peers.fates([1])[1]


@pytest.mark.parametrize("number,said", [(15, "was killed by SIGTERM"), (11, "by SIGSEGV")])
def test_other_signals_by_their_names(
    child: subprocess.Popen[bytes], number: int, said: str
) -> None:
    peers = peers_of(beat_of(child.pid))
    child.send_signal(number)
    until_state(child.pid, "Z")
    assert said in peers.fates([0])[0]


def test_another_process_of_the_same_number_is_not_the_rank() -> None:
    beat = replace(beat_of(os.getpid()), started="1")
    assert "has ended without a word" in peers_of(beat).fates([0])[0]


def test_a_rank_of_another_machine() -> None:
    beat = replace(beat_of(os.getpid()), machine="elsewhere", host="far", address="10.0.0.9")
    peers = peers_of(beat)
    assert peers.fates([0]) == {}
    assert "or its host, 10.0.0.9, cannot be reached" in peers.describe(0, {})
    seen = {0: "is stopped"}  # as a rank there has told
    assert f"rank 0 (process {beat.pid} on far) is stopped" in peers.describe(0, seen)


def test_ranks_that_never_came_and_that_left() -> None:
    peers = peers_of(None, ended(beat_of(os.getpid())))
    assert "rank 0 has not been heard of: merak.init was not called there" in peers.describe(0, {})
    assert "has left the job, since its script has ended" in peers.describe(1, {})
    assert peers.fates([0, 1]) == {}
    assert not peers.are_known


def test_time_since_a_heartbeat() -> None:
    store, beat = dist.HashStore(), replace(own_heartbeat(), busy_s=100.0)
    peers = Peers(1)
    assert peers.silent_s(0) == float("inf")
    beat.write(store, 0)
    peers.read(store)
    first = peers.silent_s(0)
    time.sleep(0.01)
    peers.read(store)
    assert peers.silent_s(0) > first
    assert not peers.has_beaten(0)
    assert (peers.busy_s(0) or 0.0) > 100.0
    replace(beat, count=1, busy_s=None).write(store, 0)
    peers.read(store)
    assert peers.has_beaten(0)
    assert peers.busy_s(0) is None


def lost(reason: str, *beats: Heartbeat | None, again: bool = True) -> str:
    """What rank 0 says of a lost connection; the others' hearts beat meanwhile, or do not."""
    store, peers = dist.HashStore(), Peers(len(beats))
    for rank, beat in enumerate(beats):
        if beat is not None:
            beat.write(store, rank)
    peers.read(store)
    for rank, beat in enumerate(beats):
        if again and beat is not None:
            replace(beat, count=beat.count + 1).write(store, rank)
    peers.read(store)
    return heartbeat.why_lost(0, peers, reason)


def test_why_a_connection_was_lost(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    own = own_heartbeat()
    live = lost("Connection reset", own, beat_of(child.pid))
    assert live.startswith("rank 0 has lost the connection to another rank (Connection reset). ")
    assert "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME (now GLOO_SOCKET_IFNAME=eth7) to" in live
    busy = replace(beat_of(child.pid), busy_s=900.0)
    late = lost("Timed out waiting 1000ms", own, busy)
    assert "rank 1 is tracing the model; raise hang_limit_s" in late
    far = replace(beat_of(child.pid), machine="elsewhere", address="10.0.0.9")
    gone = lost("Connection reset", own, far, again=False)
    assert "or its host, 10.0.0.9, cannot be reached" in gone
    assert gone.endswith("so rank 0 cannot go on (Connection reset).")
    assert "rank 1 has not been heard of" in lost("Connection reset", own, None)
    child.kill()
    until_state(child.pid, "Z")
    killed = lost("Connection reset", own, beat_of(child.pid))
    assert "was killed by SIGKILL" in killed


def test_the_address_of_a_rank_is_its_interface_or_its_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    heartbeat.own_address.cache_clear()
    assert heartbeat.own_address() == "GLOO_SOCKET_IFNAME=eth7"
    heartbeat.own_address.cache_clear()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    assert heartbeat.own_address()
    heartbeat.own_address.cache_clear()


def test_a_process_table_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda self: False)
    assert peers_of(beat_of(2**22 + 1)).fates([0]) == {}


def test_an_address_that_no_other_host_can_reach_is_named() -> None:
    near = replace(own_heartbeat(), host="a", address="127.0.1.1")
    far = replace(own_heartbeat(), host="b", machine="elsewhere", address="10.0.0.9")
    said = heartbeat.network_hint(peers_of(near, far))
    assert "at a (127.0.1.1, which only that host itself can reach), b (10.0.0.9): set" in said
    assert "which only" not in heartbeat.network_hint(peers_of(near))
