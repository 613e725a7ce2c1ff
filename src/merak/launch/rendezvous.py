"""Rendezvous of ranks on one machine: a store that listens on the loopback interface."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry

from merak.core.health.store import LOOPBACK, listen

BACKEND = "merak-one-host"
"""The name by which torch's elastic launcher finds it."""

_TIMEOUT = timedelta(seconds=300)


class OneHost(RendezvousHandler):
    """Rendezvous of a single node, with a store that only this machine can reach.

    Args:
        run_id: of the job.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._is_closed = False
        listening = listen(LOOPBACK, 0)
        self._port = listening.getsockname()[1]
        self._store = TCPStore(
            LOOPBACK, self._port, None, True, _TIMEOUT, False, master_listen_fd=listening.detach()
        )

    @property
    def use_agent_store(self) -> bool:
        """Whether ranks use the launcher's store; true, since it outlives them."""
        return True

    def get_backend(self) -> str:
        """The name of the rendezvous."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the world of this node alone."""
        store = PrefixStore(self._run_id, self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, self._port))

    def is_closed(self) -> bool:
        """Whether the job has been closed."""
        return self._is_closed

    def set_closed(self) -> None:
        """Close the job."""
        self._is_closed = True

    def num_nodes_waiting(self) -> int:
        """Return the number of nodes that would join: 0."""
        return 0

    def get_run_id(self) -> str:
        """The job's name."""
        return self._run_id

    def shutdown(self) -> bool:
        """Close the rendezvous; the store ends with its last user."""
        return True


def register() -> None:
    """Register this rendezvous with torch's elastic launcher as `BACKEND`."""

    def make(parameters: RendezvousParameters) -> RendezvousHandler:
        return OneHost(parameters.run_id)

    if BACKEND not in rendezvous_handler_registry._registry:
        rendezvous_handler_registry.register(BACKEND, make)
