"""DeepSpeed: AutoTP shards the unmodified model over two ranks (`tensor_parallel.autotp_size`)."""

from __future__ import annotations

import os
import sys

import deepspeed
import deepspeed.comm.torch
import torch
from tools.families import MICROBATCHES, SAMPLES, Family, microbatches

from rivals import ranks

CONFIG = {
    "train_micro_batch_size_per_gpu": SAMPLES // MICROBATCHES,
    "gradient_accumulation_steps": MICROBATCHES,
    "zero_optimization": {"stage": 0},
    "tensor_parallel": {"autotp_size": 2},
    "gradient_clipping": 0.0,
}


def start() -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Gloo instead, which needs no compiler.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    deepspeed.init_distributed("gloo")


def gradients(family: Family, expected: ranks.Gradients) -> ranks.Found:
    try:
        optimizer = torch.optim.SGD
        model = family.model()
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer(model.parameters(), lr=0.0), config=CONFIG
        )
    except Exception as error:
        raise ranks.SetUpError from error
    for part in microbatches(family.batch()):
        engine.backward(engine(**part).loss)
    named = engine.module.named_parameters(remove_duplicate=False)
    found = {name: p.grad for name, p in named if p.grad is not None}
    return {name: (own, ranks.shards_of(expected[name], own)) for name, own in found.items()}


if __name__ == "__main__":
    ranks.main(gradients, start)
