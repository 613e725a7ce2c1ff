"""FLOPs and saved bytes of operators, read off joint graphs."""

from __future__ import annotations

import pytest
import torch

from merak.plan.cost.operators import node_work
from merak.plan.cost.segments.measured import SegmentMemories
from tests.multirank.memory_jobs import MODELS, batch_of
from tests.unit.engine.models import graph_of

CASES = [("gpt2", 0.1, "cpu"), ("bert", 0.0, "cuda"), ("vit", 0.0, "cpu"), ("t5", 0.1, "cuda")]


@pytest.mark.parametrize(("family", "dropout", "kernels"), CASES)
def test_products_of_a_backward_are_those_that_the_forwards_operators_imply(
    family: str, dropout: float, kernels: str
) -> None:
    memories = SegmentMemories(torch.device("cpu"), kernels=kernels)
    for segment in graph_of(MODELS[family](dropout), batch_of(family)).segments:
        joint, memory = memories.joint_parts(segment), memories(segment)
        assert joint is not None
        forward = [node_work(node, kernels) for node in segment.graph.nodes]
        backward = [node_work(node, kernels).forward for node in joint.whole.backward.nodes]
        implied = sum(work.flops for own in forward for work in own.backward)
        assert sum(work.flops for own in backward for work in own) == implied, segment.name
        outputs = sum(memory.outputs[name].num_bytes for name in memory.saved_outputs)
        assert sum(joint.saved_bytes().values()) == memory.saved_bytes + outputs, segment.name
