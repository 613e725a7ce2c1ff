"""Every rank derives the same program, wherever its memory has the graph.

Ranks derive their programs by themselves, and sets of nodes are in the order of their addresses.
The tests give nodes a hash of their own, so that sets are in one order and in its reverse.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import fx

from merak.check import CheckOptions, Job
from merak.graph.ir.ir import ModelGraph
from merak.graph.segment.build import build_graph
from merak.graph.tensor_parallel.apply import tensor_parallel
from merak.graph.tensor_parallel.search.auto_shard import AutoSharder
from tests.zoo.plain.models import BY_NAME, case_of


@pytest.fixture(autouse=True)
def shared_findings() -> None:
    """None: each rank searches."""


def traced(name: str, folder: Path) -> ModelGraph:
    job = Job(case_of(BY_NAME[name]), options=CheckOptions(microbatch=4))
    return build_graph(job.source(torch.device("cpu"), folder), job.sample(), training=True)


def hash_of(sign: int) -> Callable[[fx.Node], int]:
    """Small hashes, by which a set is in the order in which nodes were met, or in reverse."""
    order: dict[int, int] = {}
    return lambda node: sign * (2 + order.setdefault(id(node), len(order)))


def rewritten(graph: ModelGraph, sequence: bool, sharder: AutoSharder) -> str:
    found = tensor_parallel(graph, None, 2, sequence=sequence, auto_sharder=sharder)
    graph, parallel = found.fit(graph)
    return "\n".join(str(parallel(segment)[0].graph) for segment in graph.segments)


@pytest.mark.parametrize("name", ["UNet", "Experts"])
def test_programs_are_equal(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = set()
    for sign in (1, -1):
        monkeypatch.setattr(fx.Node, "__hash__", hash_of(sign))
        graph = traced(name, tmp_path / str(sign))
        sharder = AutoSharder(graph.parameters, 2)
        found.add(tuple(rewritten(graph, sequence, sharder) for sequence in (False, True)))
    assert len(found) == 1
