"""The price of a candidate: its parts, and how it follows from speeds and degrees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from merak.core.errors import PlanError, ScheduleError
from merak.plan.cluster.cluster import Cluster, Link, Nodes
from merak.plan.cost.device import preset
from merak.plan.cost.kernels.segment_kernels import KernelChoice
from merak.plan.memory.ledger import Category
from merak.plan.options import ParallelOptions
from merak.plan.price import update
from merak.plan.price.candidate import Candidate
from merak.plan.price.step import memory_of, price, priced_stages
from merak.plan.price.workload import Workload
from merak.zoo.model_source import ModelSource
from merak.zoo.workload import example_workload
from tests.tiers import one_in

LLAMA = ModelSource(
    LlamaForCausalLM,
    LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
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


SLOW = Link("slow", 1e-5, 1e8)
FAST = Link("fast", 1e-6, 1e11)


def cluster(*, network: Link = SLOW, per_node: int = 2, count: int = 4) -> Cluster:
    return Cluster((Nodes(preset("a100-80gb"), per_node, count, FAST, network),))


CANDIDATES = [
    Candidate(microbatch=4, num_microbatches=8),
    Candidate(dp=2, microbatch=4, num_microbatches=4),
    Candidate(tp=2, microbatch=4, num_microbatches=8),
    Candidate(pp=2, microbatch=4, num_microbatches=8, recompute="full"),
    Candidate(dp=2, pp=2, tp=2, microbatch=2, num_microbatches=8, zero=1),
    Candidate(dp=2, pp=2, tp=2, microbatch=2, num_microbatches=8, sub_pipelining="on"),
    Candidate(dp=2, tp=2, microbatch=2, num_microbatches=8, sequence_parallel=True, zero=2),
    Candidate(dp=2, pp=2, microbatch=2, num_microbatches=8, zero=3, recompute="0.5"),
    Candidate(pp=2, microbatch=4, num_microbatches=8, schedule="zero_bubble_h1"),
    Candidate(pp=2, microbatch=4, num_microbatches=8, schedule="interleaved_1f1b",
              recompute="selective"),
    Candidate(pp=2, microbatch=4, num_microbatches=8, recompute="auto"),
    Candidate(pp=2, microbatch=4, num_microbatches=8, offload_activations="full"),
    Candidate(dp=2, microbatch=4, num_microbatches=4, zero=2, offload_optimizer="cpu"),
]  # fmt: skip


@one_in(4)
@pytest.mark.parametrize("candidate", CANDIDATES)
def test_parts_add_up_to_the_step(llama: Workload, candidate: Candidate) -> None:
    found = price(llama, cluster(), candidate)
    parts = (found.compute_s, found.bubble_s, found.exposed_communication_s, found.optimizer_s)
    assert sum(parts) == pytest.approx(found.step_s)
    assert min(parts) >= -1e-12
    assert found.compute_s > 0 and found.optimizer_s > 0
    assert 0 < found.uncertainty < 1
    assert found.tokens == 32 * 16
    assert len(found.peak_memory_bytes) == len(found.device_bytes) == candidate.pp
    assert found.fits
    assert found.candidate.partition is not None
    assert (found.bubble_s > 0) == (candidate.pp > 1)


def test_a_recomputation_is_priced_without_what_the_backward_does_not_read(
    llama: Workload,
) -> None:
    """A block's last product, and its sum over tp: nothing of its backward reads the result."""
    own = replace(CANDIDATES[2], tp=2, recompute="full")
    (stage,) = priced_stages(llama, cluster(), own)
    assert stage.whole.forward_s > stage.compute.forward_s  # sums over tp
    assert 0.0 < stage.compute.recompute_s < stage.compute.forward_s
    left = stage.whole.recompute_s - stage.compute.recompute_s
    assert left < (stage.whole.forward_s - stage.compute.forward_s) / 2


def test_other_frameworks_recompute_whole(llama: Workload) -> None:
    others = replace(llama, kernels=KernelChoice(recomputes_whole=True))
    (stage,) = priced_stages(others, cluster(), replace(CANDIDATES[2], tp=2, recompute="full"))
    assert stage.whole.recompute_s == pytest.approx(stage.whole.forward_s)


def test_flops_do_not_depend_on_the_layout(llama: Workload) -> None:
    assert len({price(llama, cluster(), own).model_flops for own in CANDIDATES[:5]}) == 1


@pytest.mark.parametrize("candidate", [CANDIDATES[1], CANDIDATES[4]])
def test_a_slower_link_makes_no_step_shorter(llama: Workload, candidate: Candidate) -> None:
    slower = replace(SLOW, bytes_per_s=SLOW.bytes_per_s / 4)
    one, other = (price(llama, cluster(network=own), candidate) for own in (SLOW, slower))
    assert other.step_s >= one.step_s
    assert other.compute_s == one.compute_s


def test_too_few_devices_are_refused(llama: Workload) -> None:
    with pytest.raises(PlanError, match="are 16 ranks, but the cluster has 8 devices"):
        price(llama, cluster(), Candidate(dp=16))


@pytest.mark.slow
def test_stages_follow_the_speed_of_their_devices() -> None:
    """The slower node gets fewer segments, and the step is faster than with equal stages."""
    wide = {"num_hidden_layers": 10, "hidden_size": 2048, "intermediate_size": 4096}
    config = LlamaConfig(**{**LLAMA.config.to_dict(), "max_position_embeddings": 512, **wide})
    model = ModelSource(LlamaForCausalLM, config, None)
    job = example_workload(model, global_batch=16, sequence=512, optimizer=adam)
    quick = Nodes(preset("a100-80gb"), 1, 1, FAST, FAST)
    slow = Nodes(preset("t4"), 1, 1, FAST, FAST)
    candidate = Candidate(pp=2, microbatch=2, num_microbatches=8)
    even = price(job, Cluster((quick, quick)), candidate).candidate
    for nodes, slower in (((quick, slow), 1), ((slow, quick), 0)):
        followed = price(job, Cluster(nodes), candidate)
        sizes = followed.candidate.partition
        assert sizes is not None and even.partition is not None
        assert sizes[slower] < even.partition[slower]
        assert followed.step_s < 0.9 * price(job, Cluster(nodes), even).step_s


def test_stages_end_where_little_crosses_a_slow_link(llama: Workload) -> None:
    """With equal devices, the links count where boundaries have different sizes."""
    slowest = Cluster((Nodes(preset("a100-80gb"), 1, 2, FAST, Link("line", 1e-5, 1e6)),))
    candidate = Candidate(pp=2, microbatch=4, num_microbatches=8)
    times = {}
    for first in range(1, 4):
        own = replace(candidate, partition=(first, len(llama.graph(4).segments) - first))
        times[first] = price(llama, slowest, own).step_s
    assert price(llama, slowest, candidate).step_s <= min(times.values())


def test_sums_in_the_gradients_own_type_take_half_the_bytes() -> None:
    """Half of the gradients' memory, and less time for their sums and their reduction."""
    prices, gradients = [], []
    candidate = Candidate(dp=2, microbatch=4, num_microbatches=4)
    for float32 in (True, False):
        workload = example_workload(
            LLAMA, global_batch=32, sequence=16, dtype=torch.bfloat16, optimizer=adam,
            common=ParallelOptions(gradient_sums="float32" if float32 else "own"),
        )  # fmt: skip
        prices.append(price(workload, cluster(), candidate))
        (memory,) = memory_of(workload, cluster(), candidate)
        gradients.append(sum(own.gradients for own in memory.stages))
    assert gradients[1] == pytest.approx(gradients[0] / 2)
    assert prices[1].step_s < prices[0].step_s
    assert max(prices[1].peak_memory_bytes) < max(prices[0].peak_memory_bytes)


@pytest.mark.parametrize(
    ("masters", "float32", "low"), [(True, True, False), (True, False, True), (False, True, True)]
)
def test_which_sums_of_gradients_zero_3_refuses(masters: bool, float32: bool, low: bool) -> None:
    sums = "float32" if float32 else "own"
    common = ParallelOptions(master_weights=masters, gradient_sums=sums)
    workload = example_workload(
        LLAMA, global_batch=8, sequence=16, dtype=torch.bfloat16, common=common
    )
    assert workload.low_sums is low


def test_reductions_that_nothing_hides_come_after_the_backward() -> None:
    common = ParallelOptions(bucket_bytes=2**15)
    workload = example_workload(LLAMA, global_batch=32, sequence=16, optimizer=adam, common=common)
    candidate = Candidate(dp=2, microbatch=4, num_microbatches=4)
    hidden = price(workload, cluster(), candidate)
    workload.kernels = KernelChoice(hides_reductions=False)
    whole = price(workload, cluster(), candidate)
    assert whole.exposed_communication_s > hidden.exposed_communication_s
    assert whole.compute_s == pytest.approx(hidden.compute_s)


def test_averages_of_local_steps_are_priced_once_in_so_many_steps() -> None:
    candidate = Candidate(dp=4, microbatch=2, num_microbatches=4)
    communication_s = {}
    for steps in (0, 1, 2, 20, 10**9):
        job = example_workload(LLAMA, global_batch=32, sequence=16, optimizer=adam)
        job.common = ParallelOptions(local_steps=steps)
        communication_s[steps] = price(job, cluster(), candidate).exposed_communication_s
    none_s = communication_s[10**9]
    assert communication_s[1] - none_s == pytest.approx(2 * (communication_s[2] - none_s), rel=1e-3)
    assert communication_s[1] - none_s == pytest.approx(
        20 * (communication_s[20] - none_s), rel=1e-3
    )
    assert none_s < communication_s[20] < communication_s[0]


def test_the_anchor_and_the_momentum_of_diloco_are_forecast() -> None:
    candidate = Candidate(dp=4, microbatch=2, num_microbatches=4)
    bytes_of = {}
    for outer in ("average", "nesterov"):
        job = example_workload(LLAMA, global_batch=32, sequence=16, optimizer=adam)
        job.common = ParallelOptions(local_steps=20, outer_optimizer=outer)
        (own,) = memory_of(job, cluster(), candidate)
        bytes_of[outer] = sum(stage.optimizer for stage in own.stages)
    parameters = sum(p.numel() * p.element_size() for p in job.model.parameters())
    assert bytes_of["nesterov"] - bytes_of["average"] == 2 * parameters


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"zero": 1}, r"zero=1 shards them over the replicas; use zero=0 with a larger tp or pp"),
        ({"schedule": "pipedream_2bw", "pp": 2, "dp": 2}, "or a synchronous schedule such as"),
    ],
)
def test_local_steps_are_refused_with_what_to_use(changes: dict[str, Any], sentence: str) -> None:
    job = example_workload(LLAMA, global_batch=32, sequence=16, optimizer=adam)
    job.common = ParallelOptions(local_steps=20)
    candidate = replace(Candidate(dp=4, microbatch=2, num_microbatches=4), **changes)
    with pytest.raises(ScheduleError, match=sentence):
        price(job, cluster(), candidate)


@pytest.mark.parametrize("name", ["chimera", "gems"])
def test_copies_of_a_model_hold_sums_of_tied_gradients_apart(name: str) -> None:
    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, n_positions=16, vocab_size=512)
    source = ModelSource(GPT2LMHeadModel, config, None)
    tied = example_workload(source, global_batch=4, sequence=16, optimizer=adam)
    tied.common = ParallelOptions(tied_gradients="step")
    own = Candidate(pp=2, num_microbatches=4, schedule=name)
    (peak, _) = (one.peak for one in memory_of(tied, cluster(), own))
    assert peak.by_category[Category.COMMUNICATION] >= 2 * 512 * 16 * 4  # of each direction's


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_optimizers_in_host_memory_take_time_for_memory(llama: Workload, zero: int) -> None:
    own = Candidate(dp=2, microbatch=4, num_microbatches=4, zero=zero)
    homes = ("off", "cpu", "/local/states")
    device, host, disk = (
        price(llama, cluster(), replace(own, offload_optimizer=home)) for home in homes
    )
    assert device.peak_memory_bytes > host.peak_memory_bytes == disk.peak_memory_bytes
    assert device.optimizer_s < host.optimizer_s < disk.optimizer_s
    assert device.compute_s == host.compute_s
    (held,) = memory_of(llama, cluster(), replace(own, offload_optimizer="/local/states"))
    assert 0 < held.host.optimizer <= held.disk_bytes


def test_an_update_that_waits_for_nothing_runs_beside_the_backward(llama: Workload) -> None:
    """Its last part alone, and what is longer than a backward, come behind the step."""
    own = Candidate(microbatch=4, num_microbatches=4, offload_optimizer="cpu")
    beside = replace(llama, steps_beside_backward=True)
    beside._traced, beside._parallel = llama._traced, llama._parallel
    late, early = (price(job, cluster(), own) for job in (llama, beside))
    assert early.optimizer_s < late.optimizer_s and early.compute_s == late.compute_s
    on_device = replace(own, offload_optimizer="off")
    assert (
        price(beside, cluster(), on_device).optimizer_s
        < price(llama, cluster(), on_device).optimizer_s
    )  # no gradients are clipped


def test_a_delayed_update_runs_beside_all_of_the_next_step(
    llama: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradients' norm, and the last parts of both copies, come behind the step."""
    own = Candidate(microbatch=4, num_microbatches=4, offload_optimizer="cpu")
    delayed = replace(llama, common=replace(llama.common, delay_optimizer_update=True))
    delayed._traced, delayed._parallel = llama._traced, llama._parallel
    then, now = (price(job, cluster(), own) for job in (llama, delayed))
    assert now.optimizer_s < then.optimizer_s and now.compute_s == then.compute_s
    files = replace(own, offload_optimizer="/local/states")
    monkeypatch.setattr(update, "FILE_BYTES_PER_S", 1e6)
    assert now.optimizer_s < price(delayed, cluster(), files).optimizer_s  # longer than a step
    (less,), (more,) = (memory_of(job, cluster(), own) for job in (llama, delayed))
    assert more.host.gradients == 2 * less.host.gradients and more.peak == less.peak
    with pytest.raises(ScheduleError, match="steps on the device; add offload_optimizer='cpu'"):
        price(delayed, cluster(), replace(own, offload_optimizer=None))


def test_zero_1_leaves_out_copies_that_share_a_parameter_with_others() -> None:
    """ALBERT's one block is read by every stage, and each pair of ranks has copies of its own."""
    config = AlbertConfig(
        vocab_size=64, embedding_size=16, hidden_size=32, num_hidden_layers=4,
        num_attention_heads=4, intermediate_size=32,
    )  # fmt: skip
    source = ModelSource(AlbertForMaskedLM, config, None)
    albert = example_workload(source, global_batch=8, sequence=16, optimizer=adam)
    own = Candidate(pp=4, microbatch=1, num_microbatches=8, schedule="chimera")
    assert price(albert, cluster(), own).step_s > 0.0
    with pytest.raises(ScheduleError, match=r"read on pp ranks \(0, 3\) and \(1, 2\)"):
        price(albert, cluster(), replace(own, zero=1))
