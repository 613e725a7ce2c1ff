"""Graphs of a workload, its unique segments, and the memory of candidates."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from merak.core.mesh import Mesh
from merak.engine.build import forecast_of
from merak.graph.ir.structure import structural_key
from merak.graph.segment.build import GraphSource
from merak.graph.segment.repeated import labels
from merak.plan.cost.device import preset
from merak.plan.engine_options import EngineOptions
from merak.plan.partition import from_sizes
from merak.plan.price.candidate import Candidate, Form
from merak.plan.price.workload import Workload
from merak.zoo.model_source import ModelSource
from merak.zoo.workload import example_signature, example_workload

LLAMA = ModelSource(
    LlamaForCausalLM,
    LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=160,
        max_position_embeddings=64,
    ),
    None,
)


def adam(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def llama() -> Workload:
    return example_workload(LLAMA, global_batch=32, sequence=16, optimizer=adam)


def test_repeated_blocks_are_one_class(llama: Workload) -> None:
    unique = llama.unique(Form(2, 2))
    assert len(unique) == len(llama.graph(2).segments)
    assert len(set(unique)) < len(unique)
    assert all(first <= index for index, first in enumerate(unique))
    assert llama.local_graph(Form(2, 2)) is llama.local_graph(Form(2, 2))
    assert (llama.tokens_per_sample, llama.sequence, llama.dtype) == (16, 16, torch.float32)


@pytest.mark.parametrize(
    "candidate",
    [
        Candidate(pp=2, microbatch=2, num_microbatches=4, partition=(5, 5)),
        Candidate(tp=2, pp=2, microbatch=2, num_microbatches=4, partition=(4, 6), zero=1, dp=2),
        Candidate(tp=2, pp=2, microbatch=2, num_microbatches=4, partition=(5, 5),
                  sequence_parallel=True, recompute="full"),
    ],
)  # fmt: skip
def test_memory_is_that_of_the_forecast(llama: Workload, candidate: Candidate) -> None:
    assert candidate.partition is not None
    options = EngineOptions(
        num_microbatches=4,
        partition=candidate.partition,
        recompute=candidate.recompute,
        zero=candidate.zero,
        sequence_parallel=candidate.sequence_parallel,
        sub_pipelining="off",
        optimizer=adam,
        device_profile=preset("h100-sxm"),
    )
    mesh = Mesh(candidate.dp, candidate.tp, candidate.pp, 0, llama.device, None)
    source = GraphSource(llama.model)
    old = forecast_of(source, example_signature(LLAMA, 16, 2), mesh, options)
    partition = from_sizes(candidate.partition, len(llama.graph(2).segments))
    new = llama.forecast(candidate, partition, device_profile=preset("h100-sxm"))
    schedule = old.layout.schedule
    assert new.ranks(schedule, old.policy) == old.ranks(schedule, old.policy)


@pytest.mark.parametrize("sequence", [False, True])
def test_copies_of_a_rewritten_segment_are_what_rewriting_each_gives(
    llama: Workload, sequence: bool
) -> None:
    graph = llama.graph(2)
    model, own = llama.tensor_rewrite(Form(2, 2, sequence)).fit(graph)
    found = llama.local_graph(Form(2, 2, sequence))
    copied = 0
    for segment, copy in zip(model.segments, found.segments, strict=True):
        local, _ = own(segment)
        copied += own.like(segment) is not segment
        assert structural_key(copy.graph) == structural_key(local.graph)
        assert labels(copy.graph) == labels(local.graph)
        assert (copy.inputs, copy.outputs) == (segment.inputs, segment.outputs)
    assert copied >= 2


@pytest.mark.slow
def test_memory_with_repeated_blocks_traced_once() -> None:
    config = {**LLAMA.config.to_dict(), "num_hidden_layers": 7}
    deep = ModelSource(LlamaForCausalLM, LlamaConfig(**config), None)
    workload = example_workload(deep, global_batch=32, sequence=16, optimizer=adam)
    candidate = Candidate(tp=2, pp=2, microbatch=1, num_microbatches=4)
    partition = from_sizes((8, 8), len(workload.graph(1).segments))
    assert workload._traced[1].repeats
    options = EngineOptions(
        num_microbatches=4, partition=(8, 8), sub_pipelining="off", optimizer=adam
    )
    source = GraphSource(workload.model)
    mesh = Mesh(1, 2, 2, 0, workload.device, None)
    old = forecast_of(source, example_signature(deep, 16, 1), mesh, options)
    new, schedule = workload.forecast(candidate, partition), old.layout.schedule
    assert new.ranks(schedule, old.policy) == old.ranks(schedule, old.policy)


def test_sub_microbatches_hold_what_the_microbatch_holds(llama: Workload) -> None:
    """No copies of what is summed, nor of what goes from part to part."""
    whole = Candidate(tp=2, microbatch=2, num_microbatches=2)
    own = (llama.forecast(one, from_sizes((10,), 10)) for one in (whole, _split(whole)))
    plain, split = (sum(one.saved_bytes().values()) for one in own)
    assert split == plain


def _split(candidate: Candidate) -> Candidate:
    return replace(candidate, sub_pipelining="on")
