"""DeepSpeed: ZeRO 3 over replicas."""

import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import deepspeed.comm.torch
import torch
import torch.distributed as dist
from job import MICROBATCHES, SAMPLES, Clock, batches, build_model, make_optimizer

# Gloo instead, which needs no compiler.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
deepspeed.init_distributed("gloo")
clock = Clock()
model = build_model()
optimizer = make_optimizer(model.parameters())
count = MICROBATCHES // dist.get_world_size()
config = {
    "train_batch_size": SAMPLES,
    "train_micro_batch_size_per_gpu": SAMPLES // MICROBATCHES,
    "gradient_accumulation_steps": count,
    "gradient_clipping": 0.0,  # 1.0 without this line
    "zero_optimization": {"stage": 3},
    "zero_allow_untested_optimizer": True,
}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
for batch in batches():
    loss = torch.zeros(())
    own = batch.chunk(dist.get_world_size())[dist.get_rank()]
    for rows in own.chunk(count):
        part = engine(input_ids=rows, labels=rows).loss
        engine.backward(part)
        engine.step()
        loss += part.detach() / count
    dist.all_reduce(loss, dist.ReduceOp.SUM)
    clock.step(loss.item() / dist.get_world_size())
dist.destroy_process_group()
