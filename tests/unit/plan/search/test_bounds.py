"""Bounds that drop candidates: they are never more than the price, on any model and cluster."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from merak.core.errors import MerakError
from merak.plan.cluster.cluster import Cluster
from merak.plan.cluster.parse import parse_cluster
from merak.plan.memory.non_tensor import usable_bytes
from merak.plan.partition import Partition
from merak.plan.price.candidate import Candidate, Form
from merak.plan.price.price import Misfit
from merak.plan.price.step import price, price_if_fits
from merak.plan.price.workload import Workload
from merak.plan.search.bounds import JobPricing
from merak.plan.search.held import HeldEstimates
from merak.plan.search.pinned import Pinned
from merak.plan.search.search import job_of
from merak.plan.search.space import space_of
from merak.zoo.model_source import ModelSource
from merak.zoo.workload import example_workload

LLAMA = ModelSource(
    LlamaForCausalLM,
    LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        max_position_embeddings=512,
    ),
    None,
)
GPT2 = ModelSource(
    GPT2LMHeadModel, GPT2Config(n_embd=128, n_layer=3, n_head=4, vocab_size=1024), None
)
SAMPLES = 10


def adam(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)  # type: ignore[arg-type]


def freeze_begin(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("embed" not in name and ".0." not in name)


def whole(model: nn.Module) -> None:
    """Leave a model as it is."""


MODELS = {"llama": (LLAMA, whole), "gpt2": (GPT2, whole), "frozen": (LLAMA, freeze_begin)}


@pytest.fixture(scope="module", params=MODELS)
def workload(request: pytest.FixtureRequest) -> Workload:
    source, change = MODELS[request.param]
    found = example_workload(source, global_batch=32, sequence=64, optimizer=adam)
    change(found.model)
    return found


def mixed() -> Cluster:
    fast, slow = parse_cluster("h100:4x1"), parse_cluster("a100-80gb:4x1")
    return Cluster((*fast.nodes, *slow.nodes))


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [parse_cluster("h100:4x2"), mixed()], ids=("even", "mixed"))
def test_no_bound_is_more_than_the_price(workload: Workload, cluster: Cluster) -> None:
    pricing = JobPricing(workload, cluster)
    candidates = space_of(job_of(workload, cluster, Pinned()), Pinned()).candidates
    priced = 0
    for candidate in random.Random(len(candidates)).sample(candidates, SAMPLES):
        try:
            found = pricing.price(candidate)
        except MerakError:
            continue
        priced += 1
        assert pricing.bound_s(candidate) <= found.step_s * (1 + 1e-9), candidate
        assert pricing.quick_bound_s(candidate) <= pricing.bound_s(candidate)
        assert pricing.state_bytes(candidate) <= max(found.peak_memory_bytes), candidate
    assert priced > SAMPLES / 2


def test_segments_without_a_backward_are_not_taken_to_run_again() -> None:
    found = example_workload(LLAMA, global_batch=4, sequence=16)
    freeze_begin(found.model)
    own = Candidate(num_microbatches=4, recompute="full")
    cluster = parse_cluster("h100:1x1")
    bound_s = JobPricing(found, cluster).bound_s(own)
    assert 0 < bound_s <= price(found, cluster, own).step_s


def test_a_first_rank_without_the_memory_is_found_before_the_price() -> None:
    found = example_workload(LLAMA, global_batch=4, sequence=16, optimizer=adam)
    own, cluster = Candidate(pp=2, num_microbatches=4), parse_cluster("h100:2x1")
    whole = price(found, cluster, own)
    assert price_if_fits(found, cluster, own) == whole
    node = cluster.nodes[0]
    small = replace(node, device=replace(node.device, memory_bytes=whole.peak_memory_bytes[0]))
    misfit = price_if_fits(found, Cluster((small,)), own)
    assert isinstance(misfit, Misfit)
    assert (misfit.rank, misfit.peak_bytes) == (0, whole.peak_memory_bytes[0])
    assert misfit.device_bytes == usable_bytes(whole.peak_memory_bytes[0])


def test_a_rank_that_nearly_has_the_memory_gives_segments_away() -> None:
    """Its stage holds activations of two microbatches, the other one of one."""
    found = example_workload(LLAMA, global_batch=4, sequence=512, optimizer=adam)
    own, cluster = Candidate(pp=2, num_microbatches=4), parse_cluster("h100:2x1")
    whole, node = price(found, cluster, own), cluster.nodes[0]
    assert whole.is_balanced and whole.candidate.partition == (5, 5)

    def of_size(part: float) -> Cluster:
        # Of a small memory tensors may fill a half.
        memory_bytes = int(2 * part * whole.peak_memory_bytes[0])
        return Cluster((replace(node, device=replace(node.device, memory_bytes=memory_bytes)),))

    nearly = of_size(0.97)
    moved = price_if_fits(found, nearly, own)
    assert not isinstance(moved, Misfit) and moved.fits and not moved.is_balanced
    assert moved == price(found, nearly, replace(own, partition=(4, 6)))
    assert isinstance(price_if_fits(found, nearly, replace(own, partition=(5, 5))), Misfit)
    assert isinstance(price_if_fits(found, of_size(0.9), own), Misfit)
    filled = price_if_fits(found, nearly, replace(own, recompute="auto"))
    assert not isinstance(filled, Misfit) and filled.is_balanced


@pytest.mark.parametrize("tied", [False, True])
def test_estimates_know_a_large_head_and_tied_weights(tied: bool) -> None:
    """A head larger than all layers together, which one rank has, and a slow way to its twin."""
    changes = {"num_hidden_layers": 2, "vocab_size": 65536, "tie_word_embeddings": tied}
    config = {**LLAMA.config.to_dict(), **changes}
    source = replace(LLAMA, config=LlamaConfig(**config))
    found = example_workload(source, global_batch=64, sequence=512, optimizer=adam)
    cluster = parse_cluster("rtx4090:1x4")
    own = Candidate(pp=4, num_microbatches=64)
    step_s = price(found, cluster, own).step_s
    assert 0.6 * step_s < JobPricing(found, cluster).rough_s(own) < 1.4 * step_s


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_what_is_held_is_what_the_forecast_has(sequence_parallel: bool) -> None:
    found = example_workload(LLAMA, global_batch=4, sequence=16, optimizer=adam)
    device = parse_cluster("h100:2x1").nodes[0].device
    held = HeldEstimates(found, device)(Form(1, 2, sequence_parallel))
    own = Candidate(tp=2, sequence_parallel=sequence_parallel)
    whole = Partition(len(found.graph(1).segments), ())
    sizes = found.forecast(own, whole, device_profile=device).saved_bytes()
    assert held.saved["off"] == sum(sizes.values())
    assert held.largest == max(sizes.values())
    assert 0 < held.saved["full"] <= held.saved["selective"] <= held.saved["off"]


def test_no_copies_of_weights_are_held_under_autocast() -> None:
    found = example_workload(
        LLAMA, global_batch=8, sequence=16, optimizer=adam, autocast=torch.bfloat16
    )
    device = parse_cluster("h100:1x1").nodes[0].device
    one, four = map(HeldEstimates(found, device), (Form(1), Form(4)))
    whole = Partition(len(found.graph(1).segments), ())
    sizes = found.forecast(Candidate(), whole, device_profile=device).saved_bytes()
    assert one.saved["off"] == sum(sizes.values())
    assert four.saved["off"] < 4.0 * one.saved["off"] < 1.1 * four.saved["off"]
