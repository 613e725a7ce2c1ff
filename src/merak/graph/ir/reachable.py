"""Nodes that can be reached from others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

Node = TypeVar("Node")


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
