"""Two hosts on one machine: network namespaces with addresses and names of their own.

Their processes share the file system, except where a folder is mounted on one host only.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, TypeVar

Found = TypeVar("Found")

REPOSITORY = Path(__file__).parents[2]
NETWORK = "192.168.77"
PORT = 29577
"""Of torchrun's rendezvous on the first host; namespaces have ports of their own."""

_ENTER = 'hostname "$0" && {mounts} exec "$@"'


class NotPermittedError(Exception):
    """This process may not make network namespaces."""


class Host:
    """A host: what runs there sees its network, its name, and its mounts alone.

    Args:
        name: of the host.
        namespace: of its network.
        address: in the network of both hosts.
    """

    def __init__(self, name: str, namespace: str, address: str) -> None:
        self.name, self.namespace, self.address = name, namespace, address
        self.mounts: dict[Path, Path] = {}
        """Folders that are others on this host, by the path that they have there."""

    def start(
        self, command: list[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a command on this host, whose output goes to a file."""
        mounts = "".join(f"mount --bind '{f}' '{at}' && " for at, f in self.mounts.items())
        enter = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c"]
        output: IO[bytes] = log.open("ab")
        with output:
            return subprocess.Popen(
                [*enter, _ENTER.format(mounts=mounts), self.name, *command],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**script_environment(), **(environment or {})},
                start_new_session=True,
            )

    def torchrun(
        self,
        ranks: int,
        script: list[str],
        log: Path,
        *,
        nodes: str = "2",
        max_restarts: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start torchrun on this host, as a user would, with its rendezvous on the first one."""
        options = [
            f"--nnodes={nodes}",
            f"--nproc-per-node={ranks}",
            f"--max-restarts={max_restarts}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={NETWORK}.1:{PORT}",
            "--rdzv-id=two-hosts",
        ]
        command = [sys.executable, "-m", "torch.distributed.run", *options, *script]
        return self.start(command, log, environment)

    def processes(self) -> list[int]:
        """Processes on this host."""
        found = _ip("netns", "pids", self.namespace).split()
        return [int(pid) for pid in found]

    def kill(self) -> None:
        """End all processes of this host at once, as a power cut would."""
        while found := self.processes():
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


class Network:
    """Two hosts that are joined by a cable.

    Raises:
        NotPermittedError: this process may not make them.
    """

    def __init__(self) -> None:
        self._own = f"merak-{secrets.token_hex(3)}"
        self.hosts = tuple(
            Host(f"host-{letter}", f"{self._own}-{letter}", f"{NETWORK}.{number}")
            for number, letter in enumerate("ab", 1)
        )
        self._files: list[Path] = []
        try:
            self._make()
        except (OSError, subprocess.CalledProcessError) as error:
            self.close()
            said = getattr(error, "stderr", "") or str(error)
            raise NotPermittedError(" ".join(said.split())) from error

    def _make(self) -> None:
        first, second = self.hosts
        for host in self.hosts:
            _ip("netns", "add", host.namespace)
            self._name(host)
        _ip(
            *("link", "add", "eth7", "netns", first.namespace, "type", "veth"),
            *("peer", "name", "eth7", "netns", second.namespace),
        )
        for host in self.hosts:
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth7")
            for interface in ("lo", "eth7"):
                _ip("-n", host.namespace, "link", "set", interface, "up")
        entered = ["ip", "netns", "exec", second.namespace, "unshare", "--uts", "hostname", "x"]
        subprocess.run(entered, check=True, capture_output=True, text=True)

    def _name(self, host: Host) -> None:
        """Write /etc/hosts of a host: torchrun must know the first by its address.

        The second's own name has a loopback address there, as Debian's installer writes it.
        """
        file = Path("/etc/netns") / host.namespace / "hosts"
        self._files.append(file.parent)
        file.parent.mkdir(parents=True)
        lines = ["127.0.0.1 localhost"]
        for other in self.hosts:
            is_loopback = other is host is self.hosts[1]
            lines.append(f"{'127.0.1.1' if is_loopback else other.address} {other.name}")
        file.write_text("\n".join(lines) + "\n", encoding="ascii")

    def limit_rate(self, rate: str) -> None:
        """Limit the cable's rate in both directions, such as "100mbit"."""
        for host in self.hosts:
            command = f"tc qdisc replace dev eth7 root tbf rate {rate} burst 64kb latency 100ms"
            entered = ["ip", "netns", "exec", host.namespace, *command.split()]
            subprocess.run(entered, check=True, capture_output=True, text=True)

    def close(self) -> None:
        """End what runs on both hosts, and remove them."""
        for host in self.hosts:
            with suppress(OSError, subprocess.CalledProcessError):
                host.kill()
            with suppress(OSError, subprocess.CalledProcessError):
                _ip("netns", "del", host.namespace)
        for folder in self._files:
            shutil.rmtree(folder, ignore_errors=True)


def _ip(*arguments: str) -> str:
    command = ["ip", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def script_environment() -> dict[str, str]:
    """The environment of a script, which finds Merak and these tests."""
    paths = os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY)])
    return {**os.environ, "PYTHONPATH": paths}


def wait_for(log: Path, pattern: str, limit_s: float = 240.0) -> str:
    """Wait until a line of an output matches, and return it."""
    return until(lambda: _line(log, pattern), f"{pattern!r} in {log}", limit_s, log)


def _line(log: Path, pattern: str) -> str | None:
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return next((line for line in text.splitlines() if re.search(pattern, line)), None)


def until(
    look: Callable[[], Found | None], what: str, limit_s: float = 240.0, log: Path | None = None
) -> Found:
    """Wait until there is something."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if (found := look()) is not None:
            return found
        time.sleep(0.1)
    text = log.read_text(encoding="utf-8", errors="replace") if log and log.exists() else ""
    raise AssertionError(f"no {what} within {limit_s:.0f} s\n{text[-6000:]}")
