"""What a segment holds is counted without numbers; here it is compared with real tensors."""

from __future__ import annotations

from itertools import zip_longest

import pytest
import torch

from merak.core.mesh import pretended
from merak.core.storages import Storages
from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import Kind
from merak.graph.joint.generate import run as run_part
from merak.graph.joint.segment import joint_segment
from merak.graph.program.codegen import as_run
from merak.graph.segment.build import GraphSource
from merak.graph.sub_pipelining.sub_microbatch import find_sample_dims, split_segment
from merak.graph.tensor_parallel.apply import auto_tensor_parallel
from merak.plan.cost.segments import measured
from merak.plan.cost.segments.by_autograd import saved_and_outputs
from merak.plan.cost.segments.measured import MeasuredGraphs, SegmentMemories
from merak.plan.price.candidate import Candidate, Form
from merak.plan.price.workload import Workload
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
    found = saved_bytes(program.stages[0], microbatch, weights, buffers)
    device = torch.device("cpu")
    memories = SegmentMemories(device)
    for segment in graph.segments:
        memory = memories(segment)
        held = memory.saved_bytes + sum(output.num_bytes for output in memory.outputs.values())
        assert held == found[segment.index], segment.name
        # As an autograd that runs the segment would save, too.
        assert sum(saved_and_outputs(segment, device, "cpu")) == found[segment.index], segment.name


@pytest.mark.parametrize("splits", [False, True])
@one_in(3)
@pytest.mark.parametrize("family", MODELS)
def test_peaks_are_those_of_real_tensors(family, splits):
    model, batch = MODELS[family](0.1), batch_of(family)
    graph = graph_of(model, batch)
    program = program_of(graph, [0, len(graph.segments)], [0])
    buffers = buffers_of(model, graph)
    microbatch = microbatch_of(program, batch, buffers)
    values = {**dict(model.named_parameters()), **buffers, **microbatch.columns}
    values |= microbatch.batch_only
    memories = SegmentMemories(torch.device("cpu"))
    for segment in graph.segments:
        memory = memories(segment)
        names = (*segment.parameters, *segment.buffers, *segment.columns, *segment.inputs)
        own = [values[name] for name in (*names, *segment.batch_only)]
        joint = joint_segment(
            segment.graph, as_run(segment.graph), segment.parameters if splits else ()
        )
        parts = joint.parts([tensor.detach() for tensor in own])
        with Storages(own) as storages:
            outputs = run_part(parts.plain, [tensor.detach() for tensor in own])
            assert storages.peak_bytes == memory.forward_bytes, segment.name
        with Storages(own) as storages:
            run_part(parts.forward, [tensor.detach() for tensor in own])
            assert storages.peak_bytes == memory.saving_forward_bytes, segment.name
        backward = memory.split if splits else memory.whole
        for expected in (backward.first_bytes, backward.later_bytes):
            with Storages([*own, *(t.grad for t in own if t.grad is not None)]) as storages:
                saved = run_part(parts.recompute, [tensor.detach() for tensor in own])
                assert storages.peak_bytes == memory.recompute_bytes, segment.name
                given = [
                    *(own[number].detach() for number in parts.reads),
                    *(torch.ones_like(o) for o, c in zip(outputs, parts.carries) if c),
                    *saved,
                    *(own[number] for number in parts.parameters),
                ]
                del saved
                start = storages.live_bytes
                storages.restart()
                made = run_part(parts.backward, given)
                assert storages.peak_bytes - start == expected, segment.name
                if parts.weights is None:
                    continue
                given = [
                    *(own[number].detach() for number in parts.weight_reads),
                    *made[len(parts.inputs) :],
                    *(own[number] for number in parts.weight_parameters),
                ]
                del made
                start = storages.live_bytes
                storages.restart()
                run_part(parts.weights, given)
                taken = storages.peak_bytes - start
        assert parts.weights is None or taken == backward.weights_bytes, segment.name
        values.update(zip(segment.outputs, outputs, strict=True))


def ones(meta):
    return torch.ones(meta.shape, dtype=meta.dtype)


def _in_turns(parts, given):
    """Results of parts of which each runs until it has started an all-reduce, in turn."""
    results = [(), ()]
    for turn in zip_longest(*parts):
        for number, piece in enumerate(turn):
            if piece is not None:
                results[number] = run_part((piece,), given[number])
    return results


@one_in(2)
@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_peaks_of_sub_microbatches_are_those_of_real_tensors(family):
    batch = batch_of(family)
    whole = graph_of(MODELS[family](0.1), batch)
    graph, rewrite = auto_tensor_parallel(whole, 2).fit(whole)
    samples = find_sample_dims(whole.segments, len(batch["labels"]))
    memories = SegmentMemories(torch.device("cpu"))
    with pretended(Candidate(tp=2).mesh(0, torch.device("cpu"))):
        for segment in graph.segments[1:-1]:
            halves = [rewrite(own)[0] for own in split_segment(segment, samples).segments]
            memory = memories.in_turns(segment, halves)
            nodes = [half.graph.find_nodes(op="placeholder") for half in halves]
            own = [{n.meta["name"]: ones(n.meta["tensor"]) for n in own} for own in nodes]
            own[1] |= {name: own[0][name] for name in segment.parameters}
            given = [list(values.values()) for values in own]
            every = [tensor for values in given for tensor in values]
            joints = [joint_segment(half.graph, as_run(half.graph), yields=True) for half in halves]
            both = [joint.parts(values) for joint, values in zip(joints, given, strict=True)]
            with Storages(every) as storages:
                _in_turns([parts.plain for parts in both], [list(values) for values in given])
                assert storages.peak_bytes == memory.forward_bytes, segment.name
            for expected in (memory.whole.first_bytes, memory.whole.later_bytes):
                grads = [t.grad for t in every if t.grad is not None]
                with Storages([*every, *grads]) as storages:
                    again = [list(values) for values in given]
                    made = _in_turns([parts.forward for parts in both], again)
                    assert storages.peak_bytes == memory.saving_forward_bytes, segment.name
                    num = len(segment.outputs)
                    back = [
                        [
                            *(values[number] for number in parts.reads),
                            *(torch.ones_like(o) for o, c in zip(results, parts.carries) if c),
                            *results[num:],
                            *(values[number] for number in parts.parameters),
                        ]
                        for values, parts, results in zip(given, both, made, strict=True)
                    ]
                    outputs = [results[:num] for results in made]
                    del made
                    start = storages.live_bytes
                    storages.restart()
                    _in_turns([parts.backward for parts in both], back)
                    assert storages.peak_bytes - start == expected, segment.name
                del outputs


@one_in(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_backwards_of_tensor_parallel_ranks_are_graphs(family, sequence_parallel):
    batch = batch_of(family)
    columns = {name: TensorMeta(tuple(c.shape), c.dtype) for name, c in batch.items()}
    workload = Workload(GraphSource(MODELS[family](0.1)), lambda _: columns, 8)
    form = Form(len(batch["labels"]), tp=2, sequence_parallel=sequence_parallel)
    memories = SegmentMemories(torch.device("cpu"), kernels="cuda")
    with pretended(Candidate(tp=2).mesh(0, torch.device("cpu"))):
        for segment in workload.local_graph(form).segments:
            assert memories.joint(segment) is not None, segment.name


def test_alike_segments_are_run_once_and_keep_their_own_names(monkeypatch):
    model, batch = MODELS["gpt2"](0.1), batch_of("gpt2")
    graph = graph_of(model, batch)
    runs = []
    memories = SegmentMemories(torch.device("cpu"), graphs=MeasuredGraphs({}))
    derive = measured.joint_graph_of

    def counted(segment, *others):
        runs.append(segment.index)
        return derive(segment, *others)

    monkeypatch.setattr(measured, "joint_graph_of", counted)
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
