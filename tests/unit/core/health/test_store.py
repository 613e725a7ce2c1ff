"""The job's store at a port that another program holds."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from merak.core.errors import MeshError
from merak.core.health import store


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(server.getsockname()[1]))
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        monkeypatch.setattr(store, "LATE_S", 0.5)
        yield server
    store.forget()


@pytest.mark.parametrize("accepts", [True, False])
def test_a_server_that_says_nothing_is_not_waited_for(
    listening: socket.socket, accepts: bool
) -> None:
    held: list[socket.socket] = []

    def accept() -> None:
        while True:
            try:
                held.append(listening.accept()[0])
            except OSError:
                return

    accepting = threading.Thread(target=accept, daemon=True)
    if accepts:
        accepting.start()
    begun = time.monotonic()
    try:
        with pytest.raises(MeshError, match=r"rank 1 on .* cannot reach the job's store at 127\.0"):
            store.open_store(1, 1.0)
    finally:
        listening.shutdown(socket.SHUT_RDWR)  # no connection comes behind those that are closed
        if accepts:
            accepting.join()
        for connection in held:
            connection.close()
    assert time.monotonic() - begun < 100.0


def test_rank_0_says_that_the_port_is_held(listening: socket.socket) -> None:
    with pytest.raises(MeshError, match=r"cannot open the job's store at .*Address already in use"):
        store.open_store(0, 1.0)


def test_a_rank_does_not_join_another_job(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    held = [store.open_store(rank, 20.0) for rank in (0, 1)]
    try:
        store.open_store(1, 20.0)  # once more in the same process
        monkeypatch.setattr(store, "_own_name", lambda: "process 7 on elsewhere")
        with pytest.raises(MeshError, match=r"^rank 1 of the job at 127\.0\.0\.1:\d+ is process"):
            store.open_store(1, 20.0)
    finally:
        store.forget()
        held.clear()


def test_an_open_port_is_one_for_a_single_rank_alone(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(MeshError, match="MASTER_PORT=0 is any free port, which 2 ranks would not"):
        store.open_store(0, 5.0)
    monkeypatch.setenv("WORLD_SIZE", "1")
    held = store.open_store(0, 20.0)
    held.set("key", "value")
    assert held.get("key") == b"value" and int(os.environ["MASTER_PORT"]) > 0


@pytest.mark.parametrize("port", ["http", "70000", "-1"])
def test_what_is_no_port_is_refused(monkeypatch, port):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(MeshError, match=f"MASTER_PORT={port} is no port; name a free one"):
        store.open_store(0, 5.0)
