"""torch's FSDP2: `fully_shard` on every layer and the model, which is ZeRO 3."""

import torch
import torch.distributed as dist
from job import MICROBATCHES, Clock, batches, build_model, make_optimizer
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
clock = Clock()
model = build_model()
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = make_optimizer(model.parameters())
count = MICROBATCHES // dist.get_world_size()
for batch in batches():
    loss = torch.zeros(())
    own = batch.chunk(dist.get_world_size())[dist.get_rank()]
    for rows in own.chunk(count):
        part = model(input_ids=rows, labels=rows).loss / count
        part.backward()
        loss += part.detach()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss, dist.ReduceOp.SUM)
    clock.step(loss.item() / dist.get_world_size())
dist.destroy_process_group()
