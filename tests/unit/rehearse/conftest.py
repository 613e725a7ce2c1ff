"""Small workloads to rehearse, and their batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from merak.plan.cluster.parse import parse_cluster
from merak.plan.price.candidate import Candidate
from merak.rehearse.rehearsal import Rehearsal, rehearse
from merak.zoo.batches.batch import example_columns
from merak.zoo.batches.columns import draw_batch
from merak.zoo.model_source import resolve_model
from merak.zoo.workload import example_workload
from tests import shared_cache

SEQUENCE = 16
LLAMA = {
    "num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 128,
}  # fmt: skip
GPT2 = {
    "n_layer": 4, "n_embd": 32, "n_head": 4, "vocab_size": 128, "n_positions": 32,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
MODELS = {"LlamaForCausalLM": LLAMA, "GPT2LMHeadModel": GPT2}
PLAN = Candidate(dp=4, tp=2, pp=4, microbatch=2, num_microbatches=8)
"""A plan for 32 devices."""


@pytest.fixture(autouse=True)
def shared_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    shared_cache.share(monkeypatch.setattr)
    shared_cache.share_found(monkeypatch.setattr)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


@pytest.fixture(scope="session")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture
def rehearsed(traces: Any) -> Callable[..., Rehearsal]:
    """Rehearse one rank of a plan for 32 H100s on the CPU."""

    def run(rank: int, name: str = "LlamaForCausalLM", **changes: Any) -> Rehearsal:
        types = {key: changes.pop(key) for key in ("dtype", "autocast") if key in changes}
        candidate = replace(PLAN, **changes)
        source = resolve_model(name, MODELS[name])
        workload = example_workload(
            source, global_batch=64, sequence=SEQUENCE, cache_dir=traces, optimizer=adam, **types
        )
        samples = candidate.microbatch * candidate.num_microbatches
        columns = example_columns(
            source.model_class, source.config, batch=samples, sequence=SEQUENCE
        )
        found = rehearse(
            workload,
            parse_cluster("h100:8x4"),
            candidate,
            rank,
            draw_batch(columns, seed=0),
            device=torch.device("cpu"),
            steps=1,
        )
        assert not dist.is_initialized()
        return found

    return run
