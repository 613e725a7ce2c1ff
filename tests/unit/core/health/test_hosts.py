"""Hosts of ranks, and the interfaces that join them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from merak.core.health import heartbeat, hosts
from merak.core.health.hosts import (
    RankHost,
    choose_interface,
    exchange_hosts,
    host_names,
    interface_of,
)
from merak.core.health.store import loopback_interface

A = RankHost("0", "alpha", "192.168.7.1", "192.168.7.1")
B = RankHost("1", "beta", "192.168.7.2", "192.168.7.1")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(heartbeat.GLOO, "")
    yield
    heartbeat.own_address.cache_clear()


def test_hosts_of_one_name_are_told_apart() -> None:
    assert host_names([A, A, B]) == ("alpha", "alpha", "beta")
    twin = RankHost("1", "alpha")
    assert host_names([A, twin, twin]) == ("alpha (node 0)", "alpha (node 1)", "alpha (node 1)")


def test_ranks_exchange_their_hosts_through_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(hosts, "own_host", lambda: B)
    store.set(f"{hosts.KEY}/1", '{"node": "1", "name": "beta"}')
    assert exchange_hosts(store, 0, 2) == [B, RankHost("1", "beta")]
    assert exchange_hosts(store, 1, 2) == [B, RankHost("1", "beta")]


def test_torchrun_names_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUP_RANK", "3")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert hosts.own_host() == RankHost("3", socket.gethostname(), "127.0.0.1", "127.0.0.1")
    monkeypatch.delenv("GROUP_RANK")
    monkeypatch.setenv("MASTER_ADDR", "")
    assert hosts.own_host().node == heartbeat.machine()


def chosen(monkeypatch: pytest.MonkeyPatch, own: RankHost, other: RankHost, name: str) -> str:
    """What `choose_interface` sets where the host's name has an address."""
    interfaces = {"192.168.7.1": "eth1", "192.168.7.2": "eth2"}
    monkeypatch.setattr(hosts, "interface_of", interfaces.get)
    monkeypatch.setattr(hosts, "_address_of_name", lambda: name)
    choose_interface([own, other], 0)
    return os.environ[heartbeat.GLOO]


def test_gloo_listens_where_the_others_reach_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, B, A, "127.0.1.1") == "eth2"
    assert heartbeat.own_address() == "GLOO_SOCKET_IFNAME=eth2"


def test_the_stores_host_learns_its_address_from_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = RankHost("0", "alpha", "127.0.1.1", "127.0.1.1")
    assert chosen(monkeypatch, own, B, "127.0.1.1") == "eth1"


@pytest.mark.parametrize(
    ("own", "other", "name"),
    [(A, B, "192.168.7.1"), (RankHost("0", "a"), RankHost("1", "b"), "")],
    ids=["the name's address will do", "nothing is known"],
)
def test_the_interface_is_left_alone(
    own: RankHost, other: RankHost, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chosen(monkeypatch, own, other, name) == ""


def test_ranks_of_one_host_meet_where_no_other_machine_reaches_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert chosen(monkeypatch, A, A, "192.168.7.1") == loopback_interface()


def test_the_users_choice_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(heartbeat.GLOO, "eth9")
    assert chosen(monkeypatch, A, B, "127.0.1.1") == "eth9"


def test_an_interface_is_found_by_its_address() -> None:
    assert interface_of("127.0.0.1") == loopback_interface()
    assert interface_of("203.0.113.7") is None
