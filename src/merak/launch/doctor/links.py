"""Links between ranks: which pairs are measured, and which of them are too slow."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise

from merak.core.doctor.finding import Finding, Level
from merak.core.units import seconds, size

SMALL_BYTES, LARGE_BYTES = 2**10, 2**22
"""Messages whose time is that of the latency, and of the bandwidth."""

SLOW_NETWORK = 100 * 10**6
"""Bytes a second below which a network is no faster than Gigabit Ethernet."""

OUTLIER = 4.0
"""How many times slower than the median of its kind a link is that needs a look."""

NAME = "links"


def chosen_pairs(hosts: Sequence[str]) -> list[tuple[int, int]]:
    """Choose pairs of ranks: neighbours inside hosts, and first ranks of neighbouring hosts.

    Of several hosts, each has one pair inside, since pairs are measured one after another.

    Args:
        hosts: of each rank.
    """
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    inside = [list(pairwise(own)) for own in ranks.values()]
    if len(ranks) > 1:
        inside = [own[:1] for own in inside]
    firsts = [own[0] for own in ranks.values()]
    return [*(pair for own in inside for pair in own), *pairwise(firsts)]


def judge_links(
    pairs: Sequence[tuple[int, int]], times: Sequence[tuple[float, float]], hosts: Sequence[str]
) -> list[Finding]:
    """Judge the measured links, those inside hosts and those between hosts apart.

    Args:
        pairs: of ranks.
        times: seconds of a message of `SMALL_BYTES` and of `LARGE_BYTES`, of each pair.
        hosts: of each rank.
    """
    found: list[Finding] = []
    for kind, is_between in (("inside a host", False), ("between hosts", True)):
        own = {
            pair: (small_s, LARGE_BYTES / large_s)
            for pair, (small_s, large_s) in zip(pairs, times, strict=True)
            if (hosts[pair[0]] != hosts[pair[1]]) is is_between
        }
        if own:
            found += _judge_kind(kind, own, hosts, is_between)
    return found or [Finding(NAME, Level.OK, "one rank, no links")]


def _judge_kind(
    kind: str,
    own: dict[tuple[int, int], tuple[float, float]],
    hosts: Sequence[str],
    is_between: bool,
) -> list[Finding]:
    median = statistics.median(rate for _, rate in own.values())
    slow = {pair: rate for pair, (_, rate) in own.items() if rate * OUTLIER < median}
    found = [
        Finding(
            NAME,
            Level.WARNING,
            f"{_named(pair, hosts)}: {size(int(rate))}/s, where others {kind} have "
            f"{size(int(median))}/s",
            "look for other load, a slower port or a faulty cable there",
        )
        for pair, rate in slow.items()
    ]
    latencies, rates = zip(*own.values())
    summary = (
        f"{kind}: {_range(latencies, seconds)} a message, {_range(rates, _rate)} "
        f"({len(own)} measured)"
    )
    if is_between and median < SLOW_NETWORK:
        fix = (
            "see that ranks use the fastest network (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), or "
            "send less over it: the page “Slow links” of the documentation"
        )
        return [*found, Finding(NAME, Level.WARNING, f"{summary}, which is slow", fix)]
    return [*found, Finding(NAME, Level.OK, summary)]


def _named(pair: tuple[int, int], hosts: Sequence[str]) -> str:
    where = [f" ({hosts[rank]})" if hosts[rank] else "" for rank in pair]
    return f"rank {pair[0]}{where[0]} and rank {pair[1]}{where[1]}"


def _rate(bytes_per_s: float) -> str:
    return f"{size(int(bytes_per_s))}/s"


def _range(values: Sequence[float], shown: Callable[[float], str]) -> str:
    low, high = shown(min(values)), shown(max(values))
    return low if low == high else f"{low} to {high}"
