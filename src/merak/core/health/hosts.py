"""Hosts of a job's ranks, and the network interface through which they reach one another.

gloo listens at the address of the host's own name. Debian's installer gives that name a loopback
address, and a host with several networks may name another one than joins the hosts: then the ranks
wait for one another for ever. The address from which a rank reaches the job's store is one that
the other hosts can reach as well.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

import psutil
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from merak.core.health.heartbeat import GLOO, machine, own_address
from merak.core.health.store import loopback_interface

logger = logging.getLogger(__name__)

KEY = "merak/hosts"
"""Store key of all ranks' hosts; keys below it hold those of single ranks."""


@dataclass(frozen=True, slots=True)
class RankHost:
    """The host of a rank.

    Args:
        node: identity of the host among those of the job.
        name: of the host.
        address: of the rank, as the host of the job's store sees it; empty if unknown.
        store: address of the store's host, as the rank's host sees it; empty if unknown.
        job: the degrees that the rank was given; empty if nobody asks.
    """

    node: str
    name: str
    address: str = ""
    store: str = ""
    job: str = ""


def own_host() -> RankHost:
    """Return the host of this rank."""
    node = os.environ.get("GROUP_RANK") or machine()
    address, store = _route(os.environ.get("MASTER_ADDR", ""))
    return RankHost(node, socket.gethostname(), address, store)


def exchange_hosts(store: Store | None, rank: int, num_ranks: int, job: str = "") -> list[RankHost]:
    """Exchange the hosts of all ranks; a collective, by rank.

    Args:
        store: the job's, before there is a process group; None where there is one.
        rank: this rank.
        num_ranks: of the job.
        job: the degrees that this rank was given.
    """
    own = replace(own_host(), job=job)
    if store is None:
        found: list[RankHost] = [own] * num_ranks
        dist.all_gather_object(found, own)
        return found
    store.set(f"{KEY}/{rank}", json.dumps(asdict(own)))
    if rank == 0:
        texts = store.multi_get([f"{KEY}/{other}" for other in range(num_ranks)])
        store.set(KEY, json.dumps([json.loads(text) for text in texts]))
    return [RankHost(**values) for values in json.loads(store.get(KEY))]


def host_names(hosts: Sequence[RankHost]) -> tuple[str, ...]:
    """Name the host of each rank; hosts of one name are told apart by a number."""
    nodes = list(dict.fromkeys(host.node for host in hosts))
    names = {host.node: host.name for host in hosts}
    if len(set(names.values())) < len(nodes):
        names = {node: f"{name} (node {nodes.index(node)})" for node, name in names.items()}
    return tuple(names[host.node] for host in hosts)


def choose_interface(hosts: Sequence[RankHost], rank: int) -> None:
    """Choose gloo's network interface, on which others reach this rank, unless the user has.

    Ranks of one host meet on its loopback interface, which no other machine can reach.

    Args:
        hosts: of all ranks.
        rank: this rank.
    """
    own = hosts[rank]
    if os.environ.get(GLOO):
        return
    if len({host.node for host in hosts}) == 1:
        interface = loopback_interface()
        if interface is not None:
            os.environ[GLOO] = interface
            own_address.cache_clear()
        return
    # On the store's own host the way to the store does not leave the host: ask the others.
    seen = [own.address, *(host.store for host in hosts if host.node != own.node)]
    address = next((a for a in seen if a and not _is_loopback(a)), None)
    if address is None or address == _address_of_name():
        return
    interface = interface_of(address)
    if interface is not None:
        logger.debug("%s=%s, which has the address %s", GLOO, interface, address)
        os.environ[GLOO] = interface
        own_address.cache_clear()


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _address_of_name() -> str | None:
    with suppress(OSError):
        return str(socket.getaddrinfo(socket.gethostname(), None)[0][4][0])
    return None


def _route(host: str) -> tuple[str, str]:
    """Return the addresses of both ends of the way to a host; empty ones where there is none."""
    with suppress(OSError):
        for family, kind, protocol, _, place in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(place)  # which sends nothing
                return str(probe.getsockname()[0]), str(place[0])
    return "", ""


def interface_of(address: str) -> str | None:
    """Return the name of this host's network interface with an address; None if unknown."""
    wanted = ipaddress.ip_address(address)
    return next((name for name, own in interface_addresses().items() if wanted in own), None)


def interface_addresses() -> dict[str, list[ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    """Return the addresses of this host's network interfaces, by their names."""
    with suppress(OSError):
        return {
            name: [
                ipaddress.ip_address(own.address.partition("%")[0])
                for own in found
                if own.family in (socket.AF_INET, socket.AF_INET6)
            ]
            for name, found in psutil.net_if_addrs().items()
        }
    return {}
