"""Steps of Merak at pp=2 against torch.distributed.pipelining's own 1F1B or GPipe, in turn.

Two ranks hold the same two stages under both: the same segments of an untied Llama, the same
weights, microbatches and loss. A step is forward and backward of all microbatches, gradients
cleared before; both ranks meet before and after it, so a step takes as long as the slower rank.
The ratios of the fastest steps and of the processor time that both ranks used depend less on what
else the machine does. Several fresh pairs of ranks are measured, and ratios are medians
over them of their steps' medians. The gradients of both are compared.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from tools import report
from tools.models import SIZES, build_model
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from transformers import LlamaForCausalLM

import merak

NUM_STAGES = 2
SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
"""Schedules that both have, by Merak's names → torch's classes."""


class First(nn.Module):
    """The embedding and the first layers."""

    def __init__(self, model: LlamaForCausalLM, num_layers: int) -> None:
        super().__init__()
        self.embed = model.model.embed_tokens
        self.rotary = model.model.rotary_emb
        self.layers = nn.ModuleList(model.model.layers[:num_layers])

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        return run_layers(self.layers, self.rotary, hidden)


class Last(nn.Module):
    """The other layers and the head."""

    def __init__(self, model: LlamaForCausalLM, num_layers: int) -> None:
        super().__init__()
        self.rotary = model.model.rotary_emb
        self.layers = nn.ModuleList(model.model.layers[num_layers:])
        self.norm = model.model.norm
        self.head = model.lm_head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(run_layers(self.layers, self.rotary, hidden)))
        return logits


def run_layers(layers: nn.ModuleList, rotary: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Layers as the model itself calls them without a padding mask: attention is causal."""
    positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
    tables = rotary(hidden, positions)
    for layer in layers:
        hidden = layer(hidden, attention_mask=None, position_embeddings=tables)
    return hidden


def next_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The model's own loss: every token predicts the next one."""
    shifted = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), shifted.flatten())


def torch_step(
    model: LlamaForCausalLM, num_layers: int, options: Any, batch: dict[str, torch.Tensor]
) -> Callable[[], None]:
    """A step of torch's pipeline over this rank's part of the model."""
    rank, device = dist.get_rank(), merak.current_mesh().device
    module = (First if rank == 0 else Last)(model, num_layers).to(device).train()
    stage = PipelineStage(module, rank, NUM_STAGES, device)
    schedule = SCHEDULES[options.schedule](stage, options.microbatches, next_token_loss)

    def step() -> None:
        module.zero_grad()
        if rank == 0:
            schedule.step(batch["input_ids"], return_outputs=False)
        else:
            schedule.step(target=batch["labels"], losses=[], return_outputs=False)

    return step


def merak_step(
    model: LlamaForCausalLM, num_layers: int, options: Any, batch: dict[str, torch.Tensor]
) -> Callable[[], None]:
    """A step of Merak over the same segments: an embedding, two per layer, a head."""
    first = 1 + 2 * num_layers
    parallel = merak.parallelize(
        model.train(),
        batch,
        num_microbatches=options.microbatches,
        schedule=options.schedule,
        partition=(first, 2 + 2 * len(model.model.layers) - first),
    )

    def step() -> None:
        parallel.step(batch)

    return step


def layers_on_first_stage(model: LlamaForCausalLM) -> int:
    """So many layers that both stages multiply about as much: the head counts too."""
    layers = model.model.layers
    in_layer = sum(parameter.numel() for parameter in layers[0].parameters())
    share = (len(layers) + model.lm_head.weight.numel() / in_layer) / 2
    return min(len(layers) - 1, round(share))


def measure(rank: int, folder: str, options: Any) -> None:
    """One rank: both pipelines, a step of each in turn; rank 0 writes the seconds down."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(NUM_STAGES)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(options.port)}
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    mesh = merak.init(pp=NUM_STAGES)
    size = SIZES[options.size]
    shape = (size.batch * options.microbatches, size.sequence)
    tokens = torch.randint(size.vocabulary, shape, generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens.to(mesh.device), "labels": tokens.to(mesh.device)}
    theirs, ours = (build_model("llama", size) for _ in range(2))
    num_layers = layers_on_first_stage(theirs)
    steps = (
        torch_step(theirs, num_layers, options, batch),
        merak_step(ours, num_layers, options, batch),
    )
    seconds: list[list[tuple[float, float]]] = [[], []]
    for _ in range(options.warmup + options.steps):
        for which, step in enumerate(steps):
            seconds[which].append(timed(step, mesh.device))
    processor = torch.tensor(seconds)[:, options.warmup :, 1].contiguous()
    dist.all_reduce(processor)
    worst = torch.tensor(gradient_difference(theirs, ours))
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    if rank == 0:
        found = {
            "layers": f"{num_layers} + {size.layers - num_layers}",
            "seconds": [[wall for wall, _ in taken[options.warmup :]] for taken in seconds],
            "processor": processor.tolist(),
            "difference": float(worst),
        }
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.barrier()


def timed(step: Callable[[], None], device: torch.device) -> tuple[float, float]:
    """Seconds until all ranks are done, and seconds of this rank's processor time."""
    dist.barrier()
    start, processor = time.perf_counter(), time.process_time()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()
    return time.perf_counter() - start, time.process_time() - processor


def gradient_difference(theirs: nn.Module, ours: nn.Module) -> float:
    """The largest difference in a gradient, relative to the largest number in it."""
    own = [(name, p.grad) for name, p in theirs.named_parameters() if p.grad is not None]
    differences = []
    for name, expected in own:
        found = ours.get_parameter(name).grad
        assert found is not None, f"Merak has no gradient of {name}"
        differences.append(((found - expected).abs().max() / expected.abs().max()).item())
    return max(differences)


def run_pair(options: Any) -> dict[str, Any]:
    """Both pipelines in fresh ranks."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, args=(folder, options), nprocs=NUM_STAGES)
        found: dict[str, Any] = json.loads(Path(folder, "found.json").read_text())
    return found


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--size", choices=sorted(SIZES), default="medium")
    parser.add_argument("--schedule", choices=sorted(SCHEDULES), default="1f1b")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10, help="steps that a round measures")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them")
    parser.add_argument("--rounds", type=int, default=5, help="fresh pairs of ranks")
    parser.add_argument("--port", type=int, default=29571)
    options = parser.parse_args()
    rounds = [run_pair(options) for _ in range(options.rounds)]
    wall = [[statistics.median(taken) for taken in found["seconds"]] for found in rounds]
    used = [[statistics.median(taken) for taken in found["processor"]] for found in rounds]
    fastest = [[min(taken) for taken in found["seconds"]] for found in rounds]
    ratios = [theirs / ours for theirs, ours in wall]
    size = SIZES[options.size]
    tokens = size.batch * options.microbatches * size.sequence
    row = {
        "model": "llama",
        "schedule": options.schedule,
        "layers": rounds[0]["layers"],
        "microbatches": options.microbatches,
        "tokens a step": tokens,
        "torch tokens/s": tokens / statistics.median(theirs for theirs, _ in wall),
        "merak tokens/s": tokens / statistics.median(ours for _, ours in wall),
        "ratio": statistics.median(ratios),
        "ratios": f"{min(ratios):.3f} … {max(ratios):.3f}",
        "ratio of fastest steps": statistics.median(theirs / ours for theirs, ours in fastest),
        "processor ratio": statistics.median(theirs / ours for theirs, ours in used),
        "largest gradient difference": max(found["difference"] for found in rounds),
    }
    title = "Merak at pp=2 against torch.distributed.pipelining"
    report.show({title: [row]}, options.json)


if __name__ == "__main__":
    main()
