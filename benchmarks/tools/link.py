"""Two hosts on one machine, as network namespaces that a link of limited rate joins."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def slow_link(rate: str | None) -> Iterator[Any]:
    """Two hosts for as long as the context lasts.

    Args:
        rate: of the link between them, such as "200mbit"; none for one host.

    Yields:
        The network; None where no rate is given.
    """
    if not rate:
        yield None
        return
    sys.path.append(str(Path(__file__).parents[2]))  # where the ranks' scripts do not look
    from tests.multirank.network import Network

    network = Network()
    try:
        network.limit_rate(rate)
        yield network
    finally:
        network.close()


def passed_bytes() -> tuple[int, int]:
    """Bytes that this host has received and sent, by all its links but the loopback."""
    lines = Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()[2:]
    fields = [line.replace(":", " ").split() for line in lines]
    links = [own for own in fields if own[0] != "lo"]
    return sum(int(own[1]) for own in links), sum(int(own[9]) for own in links)


def sent_bytes() -> int:
    """Bytes that this host has sent, by all its links but the loopback."""
    return passed_bytes()[1]
