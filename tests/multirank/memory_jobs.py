"""Jobs whose memory is estimated and then measured, on the same ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from merak.core.start.init import init
from merak.core.storages import Storages
from merak.data import signature
from merak.engine import Engine, build_engine, forecast_of
from merak.graph.segment.build import GraphSource
from merak.plan.engine_options import EngineOptions
from merak.plan.memory.ledger import Category

VOCABULARY, SEQUENCE, BATCH = 64, 24, 2

SMALL = {"vocab_size": VOCABULARY, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0}


def gpt2(dropout: float, layers: int = 3) -> nn.Module:
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    config = transformers.GPT2Config(
        n_layer=layers, n_embd=32, n_head=4, n_positions=32, **drops, **SMALL
    )
    return transformers.GPT2LMHeadModel(config)


def llama(dropout: float, layers: int = 3) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, attention_dropout=dropout, **SMALL,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def bert(dropout: float) -> nn.Module:
    config = transformers.BertConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=32, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout, vocab_size=VOCABULARY,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def t5(dropout: float) -> nn.Module:
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=dropout,
        vocab_size=VOCABULARY, use_cache=False, pad_token_id=0, decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def vit(dropout: float) -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        image_size=32, patch_size=8, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout, num_labels=5,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


class Halved(nn.Module):
    """Reads a value of what a module gives, so that autograd runs the segment's backward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.halve = module, _Halve()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        halved: torch.Tensor = self.halve(self.module(x))
        return halved


class _Halve(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2 if float(x.detach().abs().max()) > 100 else 2 * x


def opaque_llama(dropout: float) -> nn.Module:
    model = llama(dropout)
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.mlp = Halved(layer.mlp)  # type: ignore[union-attr, arg-type]
    return model


MODELS: Mapping[str, Callable[..., nn.Module]] = {
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
    "t5": t5,
    "vit": vit,
}

WITH_OPAQUE = {**MODELS, "opaque": opaque_llama}
"""Those, and one of which autograd runs some backwards."""


def batch_of(family: str) -> dict[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(3)
    if family == "vit":
        pixels = torch.randn(BATCH, 3, 32, 32, generator=draws)
        return {"pixel_values": pixels, "labels": torch.randint(0, 5, (BATCH,), generator=draws)}
    ids = torch.randint(1, VOCABULARY, (BATCH, SEQUENCE), generator=draws)
    return {"input_ids": ids, "labels": ids.clone()}


@dataclass(frozen=True)
class MemoryJob:
    """One model, one layout, one choice of what recomputes; parameters by name may be frozen."""

    family: str
    dropout: float = 0.0
    schedule: str = "1f1b"
    num_microbatches: int = 3
    frozen: str = "nothing"
    autocast: torch.dtype | None = None
    dtype: torch.dtype = torch.float32
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """Bytes beyond parameters, buffers and optimizer: estimated, and in the second step."""

    job: MemoryJob
    estimated: int
    measured: int
    at: str


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def leave_out_host(engine: Engine, storages: Storages) -> None:
    """What waits in host memory is not on the device; on the CPU nothing else tells them apart."""
    for offload in {id(s.offload): s.offload for s in engine._state.stages.values()}.values():
        if offload is not None:
            make = type(offload)._in_host

            def in_host(num_bytes: int, own: Any = offload, make: Any = make) -> torch.Tensor:
                with _disable_current_modes():
                    buffer: torch.Tensor = make(own, num_bytes)
                storages.leave_out(buffer)
                return buffer

            offload._in_host = in_host


def measure(degrees: tuple[int, int, int], jobs: list[MemoryJob], cache: Path) -> list[Measured]:
    """Estimate and run some jobs on this rank."""
    dp, tp, pp = degrees
    mesh = init(dp=dp, tp=tp, pp=pp, device="cpu")
    found = []
    for job in jobs:
        torch.manual_seed(0)
        model, batch = WITH_OPAQUE[job.family](job.dropout).to(job.dtype), batch_of(job.family)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(job.frozen not in name)
        sample = signature(batch).columns
        source, count = (
            GraphSource(model, cache_dir=cache, autocast=job.autocast),
            job.num_microbatches,
        )
        options = EngineOptions(
            schedule=job.schedule,
            num_microbatches=count,
            optimizer=adam,
            **job.options,
        )
        forecast = forecast_of(source, sample, mesh, options)
        schedule = forecast.layout.plans.base.schedule
        ranks = forecast.ranks(schedule)
        peak = ranks[mesh.pp_rank].peak
        engine = build_engine(source, sample, mesh, options)
        trained = engine.optimizer_params
        optimizer = adam(trained.named.values())
        constants = forecast.layout.graph.constants
        known = [*model.buffers(), *constants.values(), *trained.named.values()]
        known += [item.leaf for item in trained.items.values()]
        known += [] if trained.host is None else trained.host.held()
        for step in range(2):
            trained.clear_gradients()
            state = [t for s in optimizer.state.values() for t in s.values()]
            # The engine moves a batch to its device; here it is there already.
            with Storages([*engine.parameters.values(), *known, *state]) as storages:
                leave_out_host(engine, storages)
                batches = [{n: c.clone() for n, c in batch.items()} for _ in range(count)]
                engine.train_step(step, [sample] * len(batches), batches, 1.0)
                optimizer.step()
                trained.sync_model_params()
        static = sum(
            peak.by_category.get(c, 0)
            for c in (Category.PARAMETERS, Category.OPTIMIZER, Category.BUFFERS)
        )
        # Columns that the rank does not read are not carried by it, but this loop made them.
        unread = set(batch) - set(engine.columns(sample))
        extra = count * sum(batch[name].nbytes for name in unread)
        found.append(Measured(job, peak.total_bytes - static, storages.peak_bytes - extra, peak.at))
    return found
