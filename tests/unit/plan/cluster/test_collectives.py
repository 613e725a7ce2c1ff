"""Collectives against closed forms, and properties of all of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from merak.core.errors import PlanError
from merak.plan.cluster.cluster import Link
from merak.plan.cluster.collectives import KINDS, collective_seconds, send_seconds
from merak.plan.cluster.groups import Group, group_of
from merak.plan.cluster.parse import parse_cluster

LINK = Link("own", latency_s=1e-6, bytes_per_s=100e9)
NETWORK = Link("net", latency_s=10e-6, bytes_per_s=10e9)
SIZES = st.floats(1, 1e11)


def inside(size, link=LINK):
    return Group(size, 1, size, size, link, None)


def across(nodes, on_node=1):
    link = LINK if on_node > 1 else None
    return Group(nodes * on_node, nodes, on_node, on_node, link, NETWORK)


def test_a_ring_takes_its_closed_form():
    large = 1e12
    for size in (2, 4, 8):
        passed = (size - 1) / size * large / 100e9
        gathered = collective_seconds("all_gather", large, inside(size))
        assert gathered == pytest.approx((size - 1) * 1e-6 + passed, rel=1e-9)
        assert collective_seconds("reduce_scatter", large, inside(size)) == gathered
        reduced = collective_seconds("all_reduce", large, inside(size))
        assert reduced == pytest.approx(2 * gathered, rel=1e-6)


def test_a_tree_takes_over_where_latencies_count():
    """1,024 nodes: 2 · 10 messages of the tree instead of 2 · 1,023 of the ring."""
    seconds = collective_seconds("all_reduce", 8, across(1024))
    assert seconds == pytest.approx(2 * 10 * 10e-6, rel=1e-3)


def test_gathers_of_many_nodes_have_few_latencies():
    """128 nodes: 7 messages instead of 127, unless the bytes count more."""
    seconds = collective_seconds("all_gather", 8, across(128))
    assert seconds == pytest.approx(7 * 10e-6, rel=1e-3)
    large = collective_seconds("all_gather", 1e12, across(128))
    assert large == pytest.approx(127 / 128 * 1e12 / 10e9, rel=1e-3)
    assert collective_seconds("all_gather", 8, across(16, 8)) > 15 * 10e-6


def test_ranks_of_a_node_share_an_exchange_between_nodes():
    """8 ranks of each node use 8 times the network of one."""
    alone, eight = (collective_seconds("all_gather", 1e12, across(4, n)) for n in (1, 8))
    assert alone / eight == pytest.approx(8 * (3 / 4) / (31 / 32), rel=1e-3)


def test_hierarchy_is_never_slower_than_one_ring_through_all():
    for num_bytes in (1e3, 1e6, 1e9, 1e12):
        group = across(16, 8)
        flat = group.size - 1
        ring_s = 2 * (15 * 10e-6 + (flat - 15) * 1e-6 + flat / group.size * num_bytes / 80e9)
        assert collective_seconds("all_reduce", num_bytes, group) <= ring_s


def test_an_all_to_all_sends_each_shard_once():
    seconds = collective_seconds("all_to_all", 8e9, inside(8))
    assert seconds == pytest.approx(1e-6 + 1e9 * 7 / 8 / 100e9)
    seconds = collective_seconds("all_to_all", 16e9, across(2, 8))
    assert seconds == pytest.approx(10e-6 + 1e9 * 8 / 16 / 10e9)


def test_a_switch_reduces_what_h100s_publish():
    """480 GB/s of bus bandwidth on 8 H100s, 360 to 370 without the switch, 230 on A100s."""
    for name, kind, least, most in (
        ("h100:8", "all_reduce", 460, 490),
        ("h100:8", "all_gather", 355, 375),
        ("a100:8", "all_reduce", 220, 240),
    ):
        group = group_of(parse_cluster(name), 8, 1)
        passes = 2 if kind == "all_reduce" else 1
        seconds = collective_seconds(kind, 8e9, group)
        assert least < passes * 7 / 8 * 8 / seconds < most


@given(SIZES, SIZES, st.sampled_from(KINDS), st.sampled_from((inside(8), across(4), across(4, 8))))
def test_more_bytes_never_take_less_time(first, second, kind, group):
    less, more = sorted((first, second))
    times = [collective_seconds(kind, num_bytes, group) for num_bytes in (less, more)]
    assert 0 < times[0] <= times[1]


@given(SIZES, st.sampled_from(KINDS), st.integers(2, 12))
def test_more_ranks_never_take_less_time_for_the_same_shards(num_bytes, kind, size):
    """Of what each rank holds: an all-to-all and a gather are given the whole tensor."""
    fewer, more = (num_bytes * (n if kind == "all_to_all" else 1) for n in (size, size + 1))
    times = [
        collective_seconds(kind, own, inside(n)) for own, n in ((fewer, size), (more, size + 1))
    ]
    assert times[0] <= times[1] * (1 + 1e-9)


def test_small_messages_use_the_faster_protocol():
    fast = Link("fast", 10e-6, 100e9, protocols=((0.2, 0.5),))
    assert send_seconds(0, fast) == pytest.approx(2e-6)
    assert send_seconds(1e12, fast) == pytest.approx(10, rel=1e-3)
    small = collective_seconds("all_gather", 8, inside(2, fast))
    assert small == pytest.approx(2e-6, rel=1e-3)


def test_one_rank_and_no_bytes_take_no_time():
    for kind in KINDS:
        assert collective_seconds(kind, 1e9, inside(1)) == 0
        assert collective_seconds(kind, 0, inside(8)) == 0


def test_a_collective_that_nobody_knows_is_refused():
    with pytest.raises(PlanError, match="no collective 'gather'; choose one of: all_reduce, "):
        collective_seconds("gather", 8, inside(2))
