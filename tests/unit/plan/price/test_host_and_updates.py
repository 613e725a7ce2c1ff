"""What a price counts beside kernels: launches, copies of buckets, updates amid a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from merak.plan.cluster.parse import parse_cluster
from merak.plan.cost.kernels.segment_kernels import KernelChoice
from merak.plan.price.candidate import Candidate
from merak.plan.price.price import Price
from merak.plan.price.segments import price_segments
from merak.plan.price.step import price
from merak.plan.price.workload import Workload
from merak.zoo.model_source import ModelSource
from merak.zoo.workload import example_workload
from tests import optimizers
from tests.unit.plan.launches import launched_in


def job(fused: bool = False) -> Workload:
    config = LlamaConfig(
        vocab_size=160, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64,
    )  # fmt: skip

    def adam(parameters: object) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-3, fused=fused)  # type: ignore[arg-type]

    source = ModelSource(LlamaForCausalLM, config, None)
    return example_workload(source, global_batch=16, sequence=16, optimizer=adam)


AT_ONCE = launched_in(parse_cluster("h100:8"), 0.0)


def test_a_step_takes_no_less_than_its_launches() -> None:
    workload, candidate = job(), Candidate(num_microbatches=16)
    cluster = launched_in(parse_cluster("h100:8"), 1e-3)
    segments = price_segments(workload, candidate, cluster.nodes[0].device, cluster)
    kernels = [k for s in segments for k in (*s.kernels.forward, *s.kernels.backward)]
    count = sum(1 if k.work is None else k.work.kernels for k in kernels)
    assert price(workload, cluster, candidate).compute_s == pytest.approx(16 * 1e-3 * count)
    assert price(job(), AT_ONCE, candidate).compute_s < 1e-3 * 16 * count


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_buckets_are_copied_as_often_as_they_are_exchanged(zero: int) -> None:
    def step_s(copies: bool, count: int) -> float:
        workload = job()
        workload.kernels = KernelChoice(copies_buckets=copies)
        candidate = Candidate(dp=8, zero=zero, num_microbatches=count)
        return price(workload, AT_ONCE, candidate).step_s

    one_s, two_s = (step_s(True, count) - step_s(False, count) for count in (1, 2))
    gradients = sum(4 * p.numel() for p in job().model.parameters())
    rate = AT_ONCE.nodes[0].device.memory_bytes_per_s
    passes = {0: 4, 1: 3 + 2, 2: 3 + 2, 3: 3 + 2 + 2}[zero]
    assert one_s == pytest.approx(passes * gradients / rate, rel=1e-6)
    again = {0: 0, 1: 0, 2: 3, 3: 7}[zero]  # ZeRO 2 and 3 exchange after every microbatch
    assert two_s - one_s == pytest.approx(again * gradients / rate, rel=1e-6, abs=1e-12)


def test_an_asynchronous_step_updates_behind_every_microbatch() -> None:
    def found(count: int) -> Price:
        candidate = Candidate(pp=2, num_microbatches=count, schedule="pipedream")
        return price(job(), AT_ONCE, candidate)

    few, many = found(4), found(8)
    assert many.optimizer_s == pytest.approx(2 * few.optimizer_s) and few.optimizer_s > 0


def test_a_fused_optimizer_moves_fewer_bytes() -> None:
    candidate = Candidate(num_microbatches=16)
    fused, listed = (price(job(own), AT_ONCE, candidate) for own in (True, False))
    assert fused.optimizer_s < listed.optimizer_s
    assert fused.compute_s == listed.compute_s


@pytest.mark.parametrize("degrees", [{"tp": 2}, {"dp": 2, "zero": 1}])
def test_what_optimizers_exchange_of_shards_is_priced(degrees: dict[str, int]) -> None:
    """Norms by messages of a few bytes, whole parameters by three exchanges of all bytes."""

    def seconds(made: Any) -> float:
        workload, candidate = job(), Candidate(num_microbatches=1, **degrees)
        workload = replace(workload, optimizer=made)
        return price(workload, AT_ONCE, candidate).optimizer_s

    def exchanged_s(cls: Any) -> float:
        class Elementwise(cls):  # type: ignore[misc]
            def update(self, p: Any, g: Any, state: Any, group: Any) -> Any:
                super().update(p, g, state, group)
                return g

        return seconds(cls) - seconds(Elementwise)

    link = AT_ONCE.nodes[0].link
    assert link is not None
    one_s, bytes_s = link.latency_s, 4 * 80_000 / link.bytes_per_s
    assert one_s < exchanged_s(optimizers.Lamb) < exchanged_s(optimizers.Came)
    assert exchanged_s(optimizers.Came) > bytes_s
