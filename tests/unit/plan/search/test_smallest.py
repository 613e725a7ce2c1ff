"""The smallest cluster that would do: what decides is the whole memory, not the state alone."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from merak.plan.cluster.parse import parse_cluster
from merak.plan.search.bounds import JobPricing
from merak.plan.search.pinned import Pinned
from merak.plan.search.search import job_of
from merak.plan.search.smallest import smallest_cluster
from merak.plan.search.space import space_of
from merak.zoo.model_source import ModelSource
from merak.zoo.workload import example_workload


def test_every_way_of_degrees_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    config = GPT2Config(
        n_layer=2, n_embd=256, n_head=4, vocab_size=64, bos_token_id=0, eos_token_id=0
    )
    workload = example_workload(
        ModelSource(GPT2LMHeadModel, config, None),
        global_batch=16,
        sequence=1024,
        optimizer=lambda parameters: torch.optim.AdamW(parameters),  # type: ignore[arg-type]
    )
    pinned = Pinned(microbatch=1, recompute="full", schedule="1f1b", sub_pipelining="off")
    first, second = parse_cluster("rtx-4090:1"), parse_cluster("rtx-4090:2")

    pricing = JobPricing(workload, second, 1)
    prices = [
        pricing.price(one) for one in space_of(job_of(workload, second, pinned), pinned).candidates
    ]
    peaks = {max(own.peak_memory_bytes): own.candidate for own in prices}
    least = min(peaks)
    assert peaks[least].tp == 2  # by its activations: ZeRO 3 of two replicas holds as little state
    monkeypatch.setattr("merak.plan.search.smallest._TRIES", 1)
    found = smallest_cluster(workload, first, pinned)
    assert found is not None and found.candidate.tp == 2
