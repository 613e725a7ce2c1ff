"""The forecast of memory against the peak that the GPU's allocator has seen, in one command.

Every model runs two steps on as many pipeline stages as there are GPUs, with everything kept, with
everything recomputed and with selective operators saved, all with dropout. The peak is that of the
second step, from `torch.cuda.max_memory_allocated`; with `--device cpu`, where there is no
allocator to ask, the most bytes of storages alive. Ends with 1 if an estimate is off by more than
10 %.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from schedule_fidelity import spawn
from tools import report
from torch import nn

from merak.core.mesh import current_mesh
from merak.core.storages import Storages
from merak.data import signature
from merak.engine import GraphSource, build_engine, forecast_of
from merak.parallel import ParallelModel
from merak.plan import EngineOptions

LIMIT = 10.0
"""Percent that an estimate may be off."""

CHOICES = ("off", "full", "selective")
VOCABULARY = 8192


def gpt2(hidden: int) -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=4, n_embd=hidden, n_head=8, vocab_size=VOCABULARY, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config)


def llama(hidden: int) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=4,
        num_attention_heads=8, vocab_size=VOCABULARY, attention_dropout=0.1, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def bert(hidden: int) -> nn.Module:
    config = transformers.BertConfig(
        hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=4,
        num_attention_heads=8, vocab_size=VOCABULARY,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def t5(hidden: int) -> nn.Module:
    config = transformers.T5Config(
        d_model=hidden, d_kv=hidden // 8, d_ff=4 * hidden, num_layers=2, num_heads=8,
        vocab_size=VOCABULARY, use_cache=False, decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def vit(hidden: int) -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=4,
        num_attention_heads=8, image_size=128, patch_size=16, num_labels=10,
        hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
    "t5": t5,
    "vit": vit,
}


def batch_of(name: str, count: int, sequence: int) -> dict[str, torch.Tensor]:
    """So many samples for a model."""
    if name == "vit":
        return {"pixel_values": torch.randn(count, 3, 128, 128), "labels": torch.arange(count) % 10}
    tokens = torch.randint(1, VOCABULARY, (count, sequence))
    return {"input_ids": tokens, "labels": tokens.clone()}


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def run_job(num_ranks: int, options: Any) -> list[dict[str, Any]]:
    """Every model with every choice of what recomputes."""
    return [measure(name, recompute, options) for name in options.models for recompute in CHOICES]


def measure(name: str, recompute: str, options: Any) -> dict[str, Any]:
    """The worst of all ranks' estimates."""
    mesh, count = current_mesh(), options.microbatches
    torch.manual_seed(0)
    model = MODELS[name](options.hidden).train()
    batch = batch_of(name, options.batch * count, options.sequence)
    sample = signature({n: c[: options.batch] for n, c in batch.items()}).columns
    source = GraphSource(model, device=mesh.device, cache_dir=Path(options.folder))
    chosen = EngineOptions(num_microbatches=count, optimizer=adam, recompute=recompute)
    forecast = forecast_of(source, sample, mesh, chosen)
    ranks = forecast.ranks(forecast.layout.schedule)
    peak = ranks[mesh.pp_rank].peak
    engine = build_engine(source, sample, mesh, chosen)
    parallel = ParallelModel(model, engine, count, adam, None)
    parallel.step(batch)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (peak.total_bytes, peak_of_step(parallel, batch), peak.at))
    estimate, measured, at = max(found, key=lambda one: abs(one[0] / one[1] - 1))
    del parallel, engine, model, source, forecast
    gc.collect()
    return {
        "model": name,
        "recompute": recompute,
        "estimate, MB": round(estimate / 1e6, 1),
        "measured, MB": round(measured / 1e6, 1),
        "peak at": at,
        "off by %": round(100 * (estimate / measured - 1), 1),
    }


def peak_of_step(parallel: ParallelModel, batch: dict[str, torch.Tensor]) -> int:
    """The most bytes that this rank holds in a step."""
    device = parallel.engine.mesh.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        parallel.step(batch)
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)
    engine = parallel.engine
    state = parallel.optimizer.state.values() if parallel.optimizer is not None else ()
    held = [*engine.parameters.values(), *parallel.model.buffers()]
    held += [*engine._state.base.constants.values()]
    held += [t for own in state for t in own.values() if isinstance(t, torch.Tensor)]
    held = [tensor for tensor in held if tensor.device.type != "meta"]
    static = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}
    read = sum(c.nbytes for n, c in batch.items() if n in engine._state.base.columns)
    with Storages([*held, *batch.values()]) as storages:
        parallel.step(batch)
    return storages.peak_bytes + sum(static.values()) + read


def parse() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ranks", type=int, help="pipeline stages; by default one for each GPU")
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=list(MODELS))
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8, help="samples of a microbatch")
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--microbatches", type=int, default=4)
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("there is no GPU on this machine; --device cpu counts storages instead.")
    num_ranks = args.ranks or (torch.cuda.device_count() if args.device == "cuda" else 2)
    rows = spawn(run_job, num_ranks, args)
    report.show({f"{num_ranks} × {args.device}": rows}, args.json)
    worst = max(abs(row["off by %"]) for row in rows)
    if worst > LIMIT:
        sys.exit(f"the worst estimate is off by {worst} %, more than {LIMIT} %.")


if __name__ == "__main__":
    main()
