"""Forecasts and prices under context and expert parallelism, of the graph that a rank runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from merak.core.errors import ShardError
from merak.plan.cluster.parse import parse_cluster
from merak.plan.memory.ledger import Category
from merak.plan.options import ParallelOptions
from merak.plan.price.candidate import Candidate
from merak.plan.price.step import memory_of, price
from merak.plan.price.workload import Workload
from merak.plan.search.bounds import JobPricing
from merak.plan.search.pinned import Pinned
from merak.plan.search.search import search
from merak.zoo.model_source import ModelSource
from merak.zoo.workload import example_workload
from tests.unit.plan.launches import launched_in

CLUSTER = parse_cluster("h100:8x1")
SIZES = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def llama() -> Workload:
    config = LlamaConfig(**SIZES, max_position_embeddings=4096)
    source = ModelSource(LlamaForCausalLM, config, None)
    return example_workload(source, global_batch=8, sequence=4096)


@pytest.fixture(scope="module")
def mixtral() -> Workload:
    config = MixtralConfig(**SIZES, num_local_experts=8, max_position_embeddings=64)
    source = ModelSource(MixtralForCausalLM, config, None)
    return example_workload(source, global_batch=8, sequence=64)


def test_activations_are_shared_out_over_cp(llama: Workload) -> None:
    held = {}
    for cp in (1, 4):
        candidate = Candidate(cp=cp, num_microbatches=8)
        (memory,) = memory_of(llama, CLUSTER, candidate)
        held[cp] = memory.peak.by_category[Category.ACTIVATIONS]
    assert held[4] == pytest.approx(held[1] / 4, rel=0.1)


def test_cp_shares_out_the_computation_and_adds_exchanges(llama: Workload) -> None:
    cluster = launched_in(CLUSTER, 0.0)  # a model this small waits for the host
    alone, shared = (price(llama, cluster, Candidate(cp=cp, num_microbatches=8)) for cp in (1, 4))
    assert shared.model_flops == alone.model_flops and shared.tokens == alone.tokens
    assert shared.compute_s < alone.compute_s
    assert alone.exposed_communication_s < 1e-12 < shared.exposed_communication_s


def test_zero_shards_over_dp_and_cp(llama: Workload) -> None:
    both, four = (
        price(llama, CLUSTER, Candidate(zero=1, num_microbatches=8 // dp, dp=dp, cp=cp))
        for dp, cp in ((2, 2), (4, 1))
    )
    assert both.optimizer_s == pytest.approx(four.optimizer_s, rel=1e-3)


def test_ranks_of_whole_experts_hold_as_many_parameters(mixtral: Workload) -> None:
    parameters = [
        memory_of(mixtral, CLUSTER, Candidate(tp=4, ep=ep, num_microbatches=8))[0]
        .peak.by_category[Category.PARAMETERS]
        for ep in (1, 4)
    ]  # fmt: skip
    assert parameters[0] == parameters[1]


def test_the_search_tries_whole_experts(mixtral: Workload) -> None:
    found = search(mixtral, CLUSTER, Pinned(tp=4, pp=1, microbatch=1, zero=0), top=3)
    tried = [own for own in found.plans if own.candidate.ep == 4]
    left_out = [own for own in found.rejected if own.what == "ep=4"]
    assert tried or left_out


def test_the_search_has_experts_over_replicas(mixtral: Workload) -> None:
    pinned = Pinned(tp=1, pp=1, microbatch=1, zero=0, recompute="off")
    found = search(mixtral, CLUSTER, pinned, top=2)
    assert {own.candidate.ep for own in found.plans} == {1, 8}
    seconds = {
        ep: price(mixtral, CLUSTER, Candidate(dp=8, ep=ep, num_microbatches=1)).step_s
        for ep in (1, 8)
    }
    assert [own.step_s for own in found.plans] == pytest.approx(sorted(seconds.values()))


def test_places_of_experts_are_priced_where_no_job_runs() -> None:
    config = MixtralConfig(**SIZES, num_local_experts=8, max_position_embeddings=64)
    source = ModelSource(MixtralForCausalLM, config, None)
    found = []
    for factor in (1.0, 4.0):
        places = ParallelOptions(expert_capacity=factor)
        workload = example_workload(source, global_batch=8, sequence=64, common=places)
        found.append(price(workload, CLUSTER, Candidate(dp=8, ep=8, num_microbatches=1)))
    few, many = found
    assert few.step_s < many.step_s
    assert few.peak_memory_bytes[0] < many.peak_memory_bytes[0]


def test_a_model_that_fits_with_experts_over_replicas_alone_has_a_plan(mixtral: Workload) -> None:
    whole, spread = (
        memory_of(mixtral, CLUSTER, Candidate(dp=8, ep=ep, num_microbatches=1))[0].peak.total_bytes
        for ep in (1, 8)
    )
    assert spread < whole
    (nodes,) = CLUSTER.nodes
    device = replace(nodes.device, memory_bytes=whole + spread)  # half of it is usable
    small = replace(CLUSTER, nodes=(replace(nodes, device=device),))
    pinned = Pinned(tp=1, pp=1, microbatch=1, zero=0, recompute="off")
    found = search(mixtral, small, pinned, top=2)
    assert sorted(own.candidate.ep for own in found.plans) == [4, 8]


@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.parametrize("ep", [1, 2, 8])
def test_the_state_of_experts_is_sharded_over_the_replicas_that_have_the_same(
    mixtral: Workload, ep: int, zero: int
) -> None:
    own = Candidate(dp=8, ep=ep, zero=zero, num_microbatches=1)
    (memory,) = memory_of(mixtral, CLUSTER, own)
    state = sum(stage.parameters + stage.gradients + stage.optimizer for stage in memory.stages)
    assert JobPricing(mixtral, CLUSTER).state_bytes(own) == state


def test_cp_is_searched_where_nothing_fits_without(llama: Workload) -> None:
    (nodes,) = CLUSTER.nodes
    device = replace(nodes.device, memory_bytes=30 * 2**20)
    small = replace(CLUSTER, nodes=(replace(nodes, device=device),))
    pinned = Pinned(tp=1, pp=1, microbatch=1, zero=0, recompute="off")
    found = search(llama, small, pinned, top=1)
    assert found.plans and found.plans[0].candidate.cp > 1
    without = search(llama, CLUSTER, pinned, top=1)
    assert without.plans[0].candidate.cp == 1
    assert any(own.what == "cp≥2" for own in without.rejected)


def test_an_ep_without_experts_is_refused(llama: Workload) -> None:
    with pytest.raises(ShardError, match="ep=2 finds no experts to split"):
        search(llama, CLUSTER, Pinned(ep=2))
