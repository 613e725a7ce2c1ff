"""What joint graphs of tensor parallel ranks send: all that autograd's backwards do."""

from __future__ import annotations

from inspect import unwrap

import pytest
import torch

from merak.core.mesh import Mesh, pretended
from merak.graph.ir.ir import Segment
from merak.graph.joint.derive import JointGraph
from merak.graph.tensor_parallel.apply import tensor_parallel
from merak.ops import collectives
from merak.ops.collectives import copy_shared_to
from merak.plan.cost.segments.by_graph import joint_graph_of
from tests.unit.graph import tensor_parallel_cases as cases
from tests.unit.graph.tensor_parallel.test_shared_shards import model

CPU = torch.device("cpu")
MESH = Mesh(1, 4, 1, 0, CPU, None)
SUM = unwrap(collectives._sum_shared)


def joint_of(segment: Segment) -> JointGraph | str:
    with pretended(MESH):
        return joint_graph_of(segment, CPU, "cpu")


def segment_of_shared_heads() -> Segment:
    """Of four ranks, of which two have the same keys and values."""
    graph = cases.traced(model("Qwen2", 2), cases.batch(padded=False))
    split = tensor_parallel(graph, None, MESH.tp)
    segments = [split(segment)[0] for segment in graph.segments]
    return next(own for own in segments if _num_calls(own, copy_shared_to))


def _num_calls(segment: Segment, function: object) -> int:
    return sum(node.target is function for node in segment.graph.nodes)


def test_gradients_of_shared_heads_are_summed_over_their_ranks() -> None:
    segment = segment_of_shared_heads()
    joint = joint_of(segment)
    assert isinstance(joint, JointGraph)
    sums = [node for node in joint.graph.nodes if node.target is SUM]
    assert len(sums) == _num_calls(segment, copy_shared_to) == 4  # weights and biases
    assert all(node.users for node in sums)


def test_what_nothing_reads_is_not_lost_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a function of a mesh that is only pretended gives its own argument."""
    monkeypatch.setattr(collectives, "_copy_to_sum", lambda gradient: gradient)
    assert joint_of(segment_of_shared_heads()) == "nothing reads what _all_reduce gives"
