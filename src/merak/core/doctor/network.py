"""Network of the host: its name, the interfaces that ranks use, the rendezvous of the job."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from merak.core.doctor.finding import Judgement, System, fine, problem, warning
from merak.core.health.heartbeat import GLOO, INTERFACES
from merak.core.health.hosts import interface_addresses
from merak.core.units import counted

CONNECT_S = 2.0
"""Seconds that a host of the same job may take to answer a connection."""

CONNECTED, REFUSED, SILENT, NAMELESS = "connected", "refused", "silent", "nameless"


@dataclass(frozen=True, slots=True)
class HostName:
    """The host's name and its address.

    Args:
        name: of the host.
        address: that it resolves to here; empty where it resolves to none.
        reason: why it does not.
        num_hosts: of the job, as torchrun has it.
    """

    name: str
    address: str
    reason: str = ""
    num_hosts: int = 1


@dataclass(frozen=True, slots=True)
class Interfaces:
    """Network interfaces, and those that the environment names.

    Args:
        addresses: of every interface, by its name.
        named: GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, where they are set.
        num_hosts: of the job.
    """

    addresses: Mapping[str, tuple[str, ...]]
    named: Mapping[str, str] = field(default_factory=dict)
    num_hosts: int = 1


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The place where ranks of a job meet.

    Args:
        address: MASTER_ADDR:MASTER_PORT; empty outside of a job.
        opens: whether this rank opens the store there itself.
        answer: "connected", "refused", "silent", "nameless", or the system's own words.
        is_agents: whether torchrun keeps the store, which is there before any rank.
    """

    address: str
    opens: bool = False
    answer: str = CONNECTED
    is_agents: bool = False


def read_host_name(system: System) -> HostName:
    """Read the host's name and resolve it.

    Args:
        system: whose environment has the number of hosts.
    """
    name, num_hosts = socket.gethostname(), system.number("GROUP_WORLD_SIZE", 1)
    try:
        address = str(socket.getaddrinfo(name, None)[0][4][0])
    except OSError as error:
        return HostName(name, "", error.strerror or str(error), num_hosts)
    return HostName(name, address, "", num_hosts)


def read_interfaces(system: System) -> Interfaces:
    """Read the network interfaces, and which ones the environment names.

    Args:
        system: whose environment is read.
    """
    found = {name: tuple(map(str, own)) for name, own in interface_addresses().items()}
    named = {v: system.environment[v] for v in INTERFACES if system.environment.get(v)}
    return Interfaces(found, named, system.number("GROUP_WORLD_SIZE", 1))


def read_rendezvous(system: System) -> Rendezvous:
    """Connect to the job's store, where this process is a rank.

    Args:
        system: whose environment is read.
    """
    own = system.environment
    host, port = own.get("MASTER_ADDR", ""), system.number("MASTER_PORT", 0)
    if "RANK" not in own or not host or not port:
        return Rendezvous("")
    is_agents = own.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if own["RANK"] == "0" and not is_agents:
        return Rendezvous(f"{host}:{port}", opens=True)
    return Rendezvous(f"{host}:{port}", False, _connect(host, port), is_agents)


def _connect(host: str, port: int) -> str:
    try:
        with socket.create_connection((host, port), CONNECT_S):
            return CONNECTED
    except socket.gaierror:
        return NAMELESS
    except ConnectionRefusedError:
        return REFUSED
    except TimeoutError:
        return SILENT
    except OSError as error:
        return error.strerror or str(error)


def check_host_name(host: HostName) -> Iterator[Judgement]:
    """Check that the host's name has an address that other hosts can reach."""
    several = host.num_hosts > 1
    if not host.address:
        yield warning(
            f"the host's own name {host.name} has no address ({host.reason})",
            f"add a line with its address and {host.name} to /etc/hosts",
        )
    elif ipaddress.ip_address(host.address.partition("%")[0]).is_loopback and several:
        yield warning(
            f"{host.name} resolves to {host.address}, which only this host reaches; Merak finds "
            "another address for gloo, other libraries may not",
            f"give {host.name} its address in the network of the hosts in /etc/hosts, or name the "
            f"interface with {' and '.join(INTERFACES)}",
        )
    else:
        yield fine(f"{host.name} has the address {host.address}")


def check_interfaces(own: Interfaces) -> Iterator[Judgement]:
    """Check the interfaces that gloo and NCCL are to use."""
    wrong = 0
    listed = ", ".join(
        f"{name} ({addresses[0]})" for name, addresses in own.addresses.items() if addresses
    )
    for variable, value in own.named.items():
        chosen = _chosen(variable, value, own.addresses)
        judged = _judge_chosen(f"{variable}={value}", chosen, own, listed)
        if judged is not None:
            wrong += 1
            yield judged
    outside = [n for n, found in own.addresses.items() if any(not _is_loopback(a) for a in found)]
    if own.num_hosts > 1 and not outside:
        wrong += 1
        yield problem(
            f"the job has {counted(own.num_hosts, 'host')}, but this one has no network: only "
            f"{listed or 'no interface has an address'}",
            "bring an interface up, or start the container with the host's network "
            "(docker run --network host)",
        )
    if not wrong:
        named = "".join(f"; {variable}={value}" for variable, value in own.named.items())
        yield fine(f"{listed}{named}")


def _chosen(variable: str, value: str, addresses: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Interfaces that a variable names.

    gloo takes names. NCCL takes beginnings of names, after "=" whole ones, after "^" those that it
    is not to use. Source: NCCL's documentation of NCCL_SOCKET_IFNAME.
    """
    if variable == GLOO:
        wanted = [part.strip() for part in value.split(",")]
        missing = [name for name in wanted if name not in addresses]
        return [] if missing else wanted
    parts = value.lstrip("^=").split(",")
    is_whole = value.lstrip("^").startswith("=")
    found = [
        name
        for name in addresses
        if any(name == part if is_whole else name.startswith(part) for part in parts)
    ]
    return [n for n in addresses if n not in found] if value.startswith("^") else found


def _judge_chosen(given: str, chosen: list[str], own: Interfaces, listed: str) -> Judgement | None:
    fix = f"set {given.partition('=')[0]} to one of the interfaces here, {listed}, or unset it"
    if not chosen:
        return problem(f"{given} names an interface that this host does not have", fix)
    if not any(own.addresses[name] for name in chosen):
        return problem(f"{given} names an interface without an address: it is down", fix)
    loops = all(_is_loopback(a) for name in chosen for a in own.addresses[name])
    if loops and own.num_hosts > 1:
        return problem(
            f"{given} is an interface that only this host reaches, but the job has "
            f"{counted(own.num_hosts, 'host')}",
            fix,
        )
    return None


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def check_rendezvous(own: Rendezvous) -> Iterator[Judgement]:
    """Check that this rank reaches the job's store."""
    if not own.address:
        yield fine("this process is no rank of a job, so there is no MASTER_ADDR to reach")
    elif own.opens:
        yield fine(f"this rank opens the job's store at {own.address}")
    elif own.answer == CONNECTED:
        yield fine(f"the job's store at {own.address} answers")
    elif own.answer == NAMELESS:
        yield problem(
            f"MASTER_ADDR of {own.address} has no address here",
            "give torchrun an address, or a name that every host resolves, as --rdzv-endpoint",
        )
    elif own.answer == SILENT:
        yield problem(
            f"{own.address} did not answer within {CONNECT_S:g} s, as behind a firewall",
            f"let the hosts of the job reach one another on all ports (`nc -vz "
            f"{own.address.replace(':', ' ')}` tries this one), or give an address of the network "
            "that joins them",
        )
    elif own.answer == REFUSED and not own.is_agents:
        yield warning(
            f"nobody listens at {own.address}: rank 0 has not opened the job's store yet, or "
            "elsewhere",
            "see that rank 0 runs on that host, and that MASTER_ADDR and MASTER_PORT are the same "
            "on all hosts",
        )
    else:
        what = "nobody listens there" if own.answer == REFUSED else own.answer
        yield problem(
            f"the job's store at {own.address} cannot be reached: {what}",
            "let MASTER_ADDR and MASTER_PORT name the host of rank 0 and its port, the same on all "
            "hosts; torchrun sets them",
        )


def host() -> str:
    """Return the name of this host."""
    return socket.gethostname() or os.uname().nodename
