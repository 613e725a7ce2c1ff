"""torch's DistributedDataParallel: replicas of the whole model."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from job import MICROBATCHES, Clock, batches, build_model, make_optimizer
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
clock = Clock()
model = DistributedDataParallel(build_model())
optimizer = make_optimizer(model.parameters())
count = MICROBATCHES // dist.get_world_size()
for batch in batches():
    loss = torch.zeros(())
    own = batch.chunk(dist.get_world_size())[dist.get_rank()]
    for number, rows in enumerate(own.chunk(count), 1):
        with nullcontext() if number == count else model.no_sync():
            part = model(input_ids=rows, labels=rows).loss / count
            part.backward()
        loss += part.detach()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss, dist.ReduceOp.SUM)
    clock.step(loss.item() / dist.get_world_size())
dist.destroy_process_group()
