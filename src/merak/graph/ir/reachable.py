"""Nodes that can be reached from others, and from a source in front of a minimum cut."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TypeVar

Node = TypeVar("Node")

Edge = tuple[Hashable, Hashable, float]
"""Tail and head of an edge of a flow network, and its capacity."""


def reachable(seeds: Iterable[Node], following: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """Nodes that some nodes lead to, those themselves included.

    Args:
        seeds: where the search begins.
        following: gives the nodes that one leads to.
    """
    found: set[Node] = set()
    todo = list(seeds)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += following(node)
    return found


def source_side(edges: Iterable[Edge], source: Hashable, sink: Hashable) -> set[Hashable]:
    """What a source still reaches in a network that is full: in front of a minimum cut.

    Source: Ford and Fulkerson, Flows in Networks (1962), chapter I, section 5.

    Args:
        edges: of the network.
        source: where it begins.
        sink: where it ends.

    Returns:
        The smallest such set; empty where no cut has a capacity.
    """
    left: dict[Hashable, dict[Hashable, float]] = defaultdict(lambda: defaultdict(float))
    for tail, head, capacity in edges:
        left[tail][head] += capacity
        left[head][tail] += 0.0
    while True:
        before = _reached(left, source)
        if sink not in before:
            return set(before)
        path: list[Hashable] = [sink]
        while path[-1] != source:
            path.append(before[path[-1]])
        steps = list(zip(path[1:], path, strict=False))
        flow = min(left[tail][head] for tail, head in steps)
        if flow == math.inf:
            return set()
        for tail, head in steps:
            left[tail][head] -= flow
            left[head][tail] += flow


def _reached(
    left: Mapping[Hashable, Mapping[Hashable, float]], source: Hashable
) -> dict[Hashable, Hashable]:
    """What a source reaches, each with what comes before it."""
    before: dict[Hashable, Hashable] = {source: source}
    waiting: deque[Hashable] = deque([source])
    while waiting:
        tail = waiting.popleft()
        for head, capacity in left[tail].items():
            if capacity > 0 and head not in before:
                before[head] = tail
                waiting.append(head)
    return before
