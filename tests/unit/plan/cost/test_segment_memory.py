"""What a segment holds is counted without numbers; here it is compared with real tensors."""

from __future__ import annotations

import pytest
import torch

from merak.graph.ir.ir import Kind
from merak.plan.cost.segment_memory import SegmentMemories
from tests.multirank.memory_jobs import MODELS, batch_of
from tests.tiers import one_in
from tests.unit.engine.models import buffers_of, graph_of, microbatch_of, program_of


def saved_bytes(stage, microbatch, weights, buffers):
    """Bytes of the distinct storages that autograd really saves for each segment.

    Parameters, buffers, columns, derived values and inputs are left out; outputs are in.
    """
    values, found = {}, {}
    for program in stage.segments:
        segment = program.segment
        inputs = [values[name].detach().requires_grad_(c) for name, c in zip(
            segment.inputs, program.gradient_inputs, strict=True)]  # fmt: skip
        others = [
            *(weights[name] for name in segment.parameters),
            *(buffers[name] for name in segment.buffers),
            *(microbatch.columns[name] for name in segment.columns),
            *(microbatch.batch_only[name] for name in segment.batch_only),
        ]
        known = {t.untyped_storage()._cdata for t in (*inputs, *others)}
        seen = {}

        def pack(tensor, seen=seen, known=known):
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                seen[storage._cdata] = storage
            return tensor

        first = len(segment.parameters) + len(segment.buffers) + len(segment.columns)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = program.function(*others[:first], *inputs, *others[first:])
        for output in outputs:
            pack(output)
        found[segment.index] = sum(storage.nbytes() for storage in seen.values())
        values.update(zip(segment.outputs, outputs, strict=True))
    return found


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@one_in(3)
@pytest.mark.parametrize("family", MODELS)
def test_saved_bytes_are_those_of_real_tensors(family, dropout):
    model, batch = MODELS[family](dropout), batch_of(family)
    graph = graph_of(model, batch)
    program = program_of(graph, [0, len(graph.segments)], [0])
    buffers = buffers_of(model, graph)
    microbatch = microbatch_of(program, batch, buffers)
    weights = dict(model.named_parameters())
    measured = saved_bytes(program.stages[0], microbatch, weights, buffers)
    memories = SegmentMemories(torch.device("cpu"))
    for segment in graph.segments:
        memory = memories(segment)
        held = memory.saved_bytes + sum(output.num_bytes for output in memory.outputs.values())
        assert held == measured[segment.index], segment.name


def test_alike_segments_are_run_once_and_keep_their_own_names(monkeypatch):
    model, batch = MODELS["gpt2"](0.1), batch_of("gpt2")
    graph = graph_of(model, batch)
    runs = []
    memories = SegmentMemories(torch.device("cpu"))
    from merak.plan.cost import segment_memory as saved

    real = saved._measure
    monkeypatch.setattr(saved, "_measure", lambda run: runs.append(run.segment.index) or real(run))
    for segment in graph.segments:
        assert tuple(memories(segment).outputs) == segment.outputs
    # Embedding, attention, feed-forward, the last one with a norm behind it, head.
    assert runs == [0, 1, 2, 6, 7]


def test_an_output_in_an_inputs_storage_costs_nothing():
    class Passes(torch.nn.Module):
        """Hands a view of one block's result on through the next."""

        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(3))

        def forward(self, x, y):
            h = self.blocks[0](x)
            first = h.view(-1)
            for block in self.blocks[1:]:
                h = torch.tanh(block(h))
            return {"loss": ((h.view(-1) + first) * y.view(-1)).sum()}

    batch = {"x": torch.randn(2, 6), "y": torch.randn(2, 6)}
    graph = graph_of(Passes(), batch)
    memories = SegmentMemories(torch.device("cpu"))
    places = {}
    for segment in graph.segments:
        inputs = [
            n.meta["name"]
            for n in segment.graph.find_nodes(op="placeholder")
            if n.meta["kind"] is Kind.VALUE
        ]
        for name, output in memories(segment).outputs.items():
            places[name] = output
            assert (output.num_bytes == 0) == (output.root in (*inputs, "")), name
    assert places
