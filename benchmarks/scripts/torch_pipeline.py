"""torch.distributed.pipelining: stages cut by hand, since `pipeline()` cannot split this model."""

import torch
import torch.distributed as dist
from job import MICROBATCHES, OPTIONS, Clock, batches, build_model, make_optimizer
from torch import nn
from torch.distributed import pipelining


class Stage(nn.Module):
    """Some of the layers, the embedding with the first of them, the head with the last."""

    def __init__(self, number: int, count: int) -> None:
        super().__init__()
        whole = build_model()
        each = len(whole.model.layers) // count
        self.layers = nn.ModuleList(whole.model.layers[number * each : (number + 1) * each])
        self.rotary = whole.model.rotary_emb
        self.embed = whole.model.embed_tokens if number == 0 else None
        self.norm = whole.model.norm if number == count - 1 else None
        self.head = whole.lm_head if number == count - 1 else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.embed is not None:
            hidden = self.embed(hidden)
        tables = self.rotary(hidden, torch.arange(hidden.shape[1])[None])
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=None, position_embeddings=tables)
        return hidden if self.head is None else self.head(self.norm(hidden))


def next_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    shifted = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), shifted.flatten())


dist.init_process_group("gloo")
clock = Clock()
rank, ranks = dist.get_rank(), dist.get_world_size()
cls = getattr(pipelining, OPTIONS["schedule"])
places = {"loop": [rank, rank + ranks], "v": [rank, 2 * ranks - 1 - rank]}
numbers = places.get(OPTIONS["stages"], [rank])
count = len(numbers) * ranks
modules = [Stage(number, count) for number in numbers]
stages = [
    pipelining.PipelineStage(module, number, count, torch.device("cpu"))
    for module, number in zip(modules, numbers)
]
is_multi = OPTIONS["stages"] != "one"
schedule = cls(stages if is_multi else stages[0], MICROBATCHES, next_token_loss)
optimizer = make_optimizer([p for own in modules for p in own.parameters()])
for batch in batches():
    losses: list[torch.Tensor] = []
    inputs = (batch,) if 0 in numbers else ()
    if count - 1 in numbers:
        schedule.step(*inputs, target=batch, losses=losses, return_outputs=False)
    else:
        schedule.step(*inputs, return_outputs=False)
    optimizer.step()
    optimizer.zero_grad()
    dist.barrier()
    clock.step(torch.stack(losses).mean().item() if losses else None)
dist.destroy_process_group()
