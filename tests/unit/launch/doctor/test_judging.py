"""What is made of measured links, clocks and the differences between hosts."""

from __future__ import annotations

import pytest

from merak.core.doctor.finding import Finding, Level, System
from merak.launch.doctor.clocks import Offset, fastest, judge_clocks
from merak.launch.doctor.differences import Traits, compare_hosts, merge_hosts, read_traits
from merak.launch.doctor.links import LARGE_BYTES, chosen_pairs, judge_links


@pytest.mark.parametrize(
    ("hosts", "pairs"),
    [
        ([""], []),
        (["", "", ""], [(0, 1), (1, 2)]),
        (["a", "a", "a", "b", "b", "c"], [(0, 1), (3, 4), (0, 3), (3, 5)]),
        (["a", "b", "a", "b"], [(0, 2), (1, 3), (0, 1)]),
    ],
)
def test_pairs_cover_hosts_and_the_ways_between(
    hosts: list[str], pairs: list[tuple[int, int]]
) -> None:
    assert chosen_pairs(hosts) == pairs


def times(*rates: float) -> list[tuple[float, float]]:
    return [(1e-5, LARGE_BYTES / rate) for rate in rates]


def test_equal_links_are_fine() -> None:
    found = judge_links([(0, 1), (1, 2)], times(3e9, 4e9), ["", "", ""])
    assert [one.level for one in found] == [Level.OK]
    assert found[0].found == "inside a host: 10.0 µs a message, 3.0 GB/s to 4.0 GB/s (2 measured)"
    assert judge_links([], [], [""])[0].found == "one rank, no links"


def test_a_slow_link_is_named() -> None:
    pairs = [(0, 1), (1, 2), (2, 3)]
    found = judge_links(pairs, times(4e9, 0.5e9, 4e9), ["", "", "", ""])
    assert [one.level for one in found] == [Level.WARNING, Level.OK]
    assert found[0].found == (
        "rank 1 and rank 2: 500.0 MB/s, where others inside a host have 4.0 GB/s"
    )


def test_a_slow_network_is_a_warning_and_a_fast_one_is_not() -> None:
    hosts = ["a", "a", "b"]
    inside, between = judge_links([(0, 1), (0, 2)], times(4e9, 20e6), hosts)
    assert (inside.level, between.level) == (Level.OK, Level.WARNING)
    assert between.found.startswith("between hosts: 10.0 µs a message, 20.0 MB/s (1 measured), wh")
    assert "GLOO_SOCKET_IFNAME" in between.fix
    found = judge_links([(0, 1), (0, 2)], times(4e9, 1e9), hosts)
    assert [one.level for one in found] == [Level.OK, Level.OK]


def test_the_fastest_exchange_says_most_about_a_clock() -> None:
    # The other clock is 100 s ahead; the first answer was slow on its way back.
    slow, fast = (0.0, 101.0, 9.0), (10.0, 110.5, 11.0)
    assert fastest([slow, fast]) == Offset(100.0, 0.5)


def test_clocks_that_differ_are_named() -> None:
    hosts = ["a", "b", "c", "d"]
    offsets = {"b": Offset(7.5, 0.1), "c": Offset(-2.0, 0.1), "d": Offset(1.5, 1.0)}
    found = judge_clocks(offsets, hosts)
    assert [one.found for one in found] == [
        "the clock of b is 7.500 s ahead of that of a",
        "the clock of c is 2.000 s behind that of a",
    ]
    assert {one.level for one in found} == {Level.WARNING}
    assert "set-ntp" in found[0].fix
    (fine,) = judge_clocks({"b": Offset(-0.001, 0.001)}, ["a", "b"])
    assert (fine.level, fine.found) == (Level.OK, "all hosts within 2.000 ms")
    assert judge_clocks({}, [""])[0].level is Level.OK


def test_differences_between_hosts_are_named() -> None:
    one = Traits({"torch": "2.13"}, {"GPUs": "8 × H100"}, {"OMP_NUM_THREADS": "4"})
    other = Traits({"torch": "2.12"}, {"GPUs": "8 × A100"}, {})
    found = compare_hosts({"a": one, "b": other, "c": one})
    assert [(own.level, own.found) for own in found] == [
        (Level.PROBLEM, "torch differs: 2.13 on a, c; 2.12 on b"),
        (Level.WARNING, "GPUs differs: 8 × H100 on a, c; 8 × A100 on b"),
        (Level.WARNING, "OMP_NUM_THREADS differs: 4 on a, c; none on b"),
    ]
    assert [own.level for own in compare_hosts({"a": one, "b": one})] == [Level.OK]
    assert compare_hosts({"": one}) == []


def test_traits_leave_out_what_may_differ() -> None:
    own = {"NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "eth0", "HOME": "/root"}
    found = read_traits(System(own))
    assert found.variables == {"NCCL_DEBUG": "WARN"}
    assert found.versions["torch"]


def test_what_is_the_same_on_several_hosts_is_one_line() -> None:
    python = Finding("python", Level.OK, "Python 3.11")
    one, other = (Finding("memory", Level.OK, f"{n} GB are free") for n in (7, 8))
    assert merge_hosts({"a": [python, one], "b": [python, other]}) == [
        Finding("python", Level.OK, "Python 3.11", host="a, b"),
        Finding("memory", Level.OK, "7 GB are free", host="a"),
        Finding("memory", Level.OK, "8 GB are free", host="b"),
    ]
    assert merge_hosts({"": [python, one]}) == [python, one]
