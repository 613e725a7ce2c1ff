"""FSDP2: torch's `fully_shard` on every layer and the model, as Accelerate applies it on GPUs.

Accelerate itself passes over its FSDP plugin where there is no GPU.
"""

from __future__ import annotations

import torch.distributed as dist
from tools.families import MICROBATCHES, Family, microbatches
from torch.distributed.fsdp import fully_shard

from rivals import ranks


def gradients(family: Family, expected: ranks.Gradients) -> ranks.Found:
    model = family.model()
    try:
        layers = set(model._no_split_modules)  # as transformer_based_wrap reads them
        for module in list(model.modules()):
            if type(module).__name__ in layers:
                fully_shard(module)
        fully_shard(model)
    except Exception as error:
        raise ranks.SetUpError from error
    own = microbatches(family.batch())[dist.get_rank() :: dist.get_world_size()]
    for part in own:
        (model(**part).loss / (MICROBATCHES // dist.get_world_size())).backward()
    named = model.named_parameters(remove_duplicate=False)
    return {name: p.grad.full_tensor() for name, p in named if p.grad is not None}


if __name__ == "__main__":
    ranks.main(gradients)
