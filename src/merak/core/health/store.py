"""Job store of keys and values (TCPStore), through which ranks meet and exchange heartbeats."""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from merak.core.errors import MeshError
from merak.core.health.attempt import agree_on_attempt

LOOPBACK = "127.0.0.1"
"""The address of the interface that only this machine reaches."""

ANSWER_S = 5.0
"""Seconds within which the store answers a question."""

SILENT_S = 60.0
"""Seconds in which a store that listens has answered, however many ranks ask it."""

LATE_S = 5.0
"""Seconds that torch's own timeout of a connection may come late, which says more."""

_opened: list[Store] = []
_attempt: list[int] = []


def is_agents() -> bool:
    """Whether torchrun keeps the job's store, which then outlives every rank."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def address() -> str:
    """Return the address of the job's store, for messages."""
    return f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"


def open_store(rank: int, timeout_s: float) -> Store:
    """Open the store that the job's process group is made with.

    Where torchrun does not keep one, rank 0 opens it; on the loopback interface alone where
    MASTER_ADDR is of that, so that no other machine can reach it.

    Args:
        rank: this rank.
        timeout_s: seconds that a rank may take to reach it, and to wait for a key.

    Raises:
        MeshError: it cannot be opened or reached.
    """
    host, timeout = os.environ.get("MASTER_ADDR", ""), timedelta(seconds=timeout_s)
    port = _port()
    if not host or not port:
        raise MeshError(
            "RANK is set, but not MASTER_ADDR and MASTER_PORT, where the ranks of the job find one "
            "another; start the script with torchrun."
        )
    keeps = rank == 0 and not is_agents()
    try:
        if keeps and (listening := _on_loopback(host, port)) is not None:
            descriptor = listening.detach()
            store = TCPStore(host, port, None, True, timeout, False, master_listen_fd=descriptor)
        else:
            store = _answering(
                lambda: TCPStore(
                    host, port, None, keeps, timeout, wait_for_workers=False, multi_tenant=True
                ),
                (host, port),
                timeout_s,
            )
    except (dist.DistError, OSError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        action = "open" if keeps else "reach"
        raise MeshError(
            f"rank {rank} on {socket.gethostname()} cannot {action} the job's store at {host}:"
            f"{port} ({reason}); let MASTER_ADDR and MASTER_PORT name rank 0's host and a free "
            "port that the other hosts can reach."
        ) from error
    prefixed = _of_attempt(store, timeout_s) if is_agents() else PrefixStore("merak", store)
    if not is_agents():
        _refuse_second(prefixed, rank)
    # Questions get another connection: the group's own waits long for ranks that are late.
    _opened[:] = [_quick(prefixed)]
    return prefixed


def _port() -> int | None:
    """Port of the job's store; a free one where a single rank leaves it open by 0.

    Raises:
        MeshError: it is no port, or open though several ranks must find it.
    """
    written = os.environ.get("MASTER_PORT", "")
    if not written:
        return None
    if not written.isdecimal() or int(written) >= 2**16:
        raise MeshError(
            f"MASTER_PORT={written} is no port; name a free one from 1 to 65535 on rank 0's host, "
            "the same on all ranks."
        )
    if int(written):
        return int(written)
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if num_ranks > 1:
        raise MeshError(
            f"MASTER_PORT=0 is any free port, which {num_ranks} ranks would not agree on; name a "
            "free one on rank 0's host, the same on all ranks, or start them with torchrun "
            "--standalone."
        )
    with socket.socket() as taken:
        taken.bind(("", 0))
        port: int = taken.getsockname()[1]
    os.environ["MASTER_PORT"] = str(port)
    return port


def _refuse_second(store: Store, rank: int) -> None:
    """Refuse a store that another process of the same rank has joined: that of another job."""
    own = _own_name()
    joined = store.compare_set(f"joined/{rank}", "", own).decode()
    if joined != own:
        raise MeshError(
            f"rank {rank} of the job at {address()} is {joined}, so another job has this "
            "MASTER_PORT; name a free port, on all ranks of this job."
        )


def _own_name() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _answering(make: Callable[[], TCPStore], place: tuple[str, int], timeout_s: float) -> TCPStore:
    """Make a store in a thread: torch waits without a limit where another server has the port.

    Args:
        make: makes it, and fails by itself where nobody listens for `timeout_s`.
        place: host and port.
        timeout_s: seconds that it may take.

    Raises:
        TimeoutError: something listens there, and does not answer as a store does.
    """
    made: Future[TCPStore] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=run, daemon=True, name="merak store").start()
    silent_s = min(timeout_s, SILENT_S)
    wait([made], silent_s)
    if not made.done() and not _listens(place):
        wait([made], timeout_s - silent_s)
    wait([made], LATE_S)
    if not made.done():
        raise TimeoutError("another program listens there, which does not answer as a store does")
    return made.result()


def _listens(place: tuple[str, int]) -> bool:
    with suppress(OSError), socket.create_connection(place, ANSWER_S):
        return True
    return False


def join(timeout_s: float) -> None:
    """Agree on the attempt with ranks whose process group the script itself has made.

    Args:
        timeout_s: seconds to wait for other ranks.
    """
    if is_agents():
        _of_attempt(agents(), timeout_s)


def forget() -> None:
    """Drop the store that was opened, and the attempt that ranks have agreed on."""
    _opened.clear()
    _attempt.clear()


def has_joined() -> bool:
    """Whether this rank shares keys with the others: not before they agree on the attempt."""
    return bool(_attempt) or not is_agents()


def _of_attempt(store: Store, timeout_s: float) -> PrefixStore:
    """The part of the agent's store that belongs to this attempt, on which ranks agree once."""
    if not _attempt:
        rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        _attempt.append(agree_on_attempt(store, rank, num_ranks, timeout_s))
    return PrefixStore(f"merak attempt {_attempt[0]}", store)


def agents() -> Store:
    """Open a connection to the store that torchrun's agent keeps, with the keys of all attempts."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=ANSWER_S))


def connect() -> Store:
    """Open a further connection to the job's store, apart from what other threads wait for there.

    Where it is not torchrun that keeps the store, the rank that does must still live.
    """
    if is_agents():
        return shared()
    return _quick(shared())


def shared() -> Store:
    """Return the connection to the job's store for occasional queries, once ranks have joined."""
    if is_agents():
        return _of_attempt(agents(), ANSWER_S)
    if _opened:
        return _opened[0]
    return dist.distributed_c10d._get_default_store()


def _quick(store: Store) -> Store:
    other: Store = store.clone()  # type: ignore[attr-defined]
    other.set_timeout(timedelta(seconds=ANSWER_S))
    return other


def _on_loopback(host: str, port: int) -> socket.socket | None:
    """Open a socket on the loopback interface; None where other hosts are to reach the store."""
    if host != "localhost":
        try:
            is_own = ipaddress.ip_address(host).is_loopback
        except ValueError:
            is_own = False  # a name, which may mean another address elsewhere
        if not is_own:
            return None
    return listen(host, port)


def listen(host: str, port: int) -> socket.socket:
    """Listen on the first address of a host's name, before torch's store listens on all.

    Args:
        host: a name or an address of this machine.
        port: 0 for any that is free.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, place = sorted(found, key=lambda f: f[0] != socket.AF_INET6)[0]
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(place)
        listening.listen(2048)
    except OSError:
        listening.close()
        raise
    return listening


def loopback_interface() -> str | None:
    """Return the name of the loopback interface; None if it is unknown, or down."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((LOOPBACK, 9))  # which sends nothing, and fails without a route
        names = {name for _, name in socket.if_nameindex()}
        return next((name for name in ("lo", "lo0") if name in names), None)
    return None
