"""torch.distributed.pipelining: `pipeline()` splits the unmodified model, 1F1B trains it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from tools.families import MICROBATCHES, Family, microbatches
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline

from rivals import ranks


def gradients(family: Family, expected: ranks.Gradients) -> ranks.Found:
    model, batch = family.model(), family.batch()
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    example = {name: value for name, value in microbatches(batch)[0].items() if name in inputs}
    try:
        pipe = pipeline(model, (), example, {family.middle: SplitPoint.BEGINNING})
        stage = pipe.build_stage(dist.get_rank(), torch.device("cpu"))
    except Exception as error:
        raise ranks.SetUpError from error

    def loss(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
        return family.loss(outputs if torch.is_tensor(outputs) else outputs[0], labels)

    schedule = Schedule1F1B(stage, MICROBATCHES, loss)
    if dist.get_rank() == 0:
        schedule.step(**inputs)
    else:
        schedule.step(target=batch["labels"], losses=[])
    module = pipe.get_stage_module(dist.get_rank())
    named = module.named_parameters(remove_duplicate=False)
    return {name: p.grad for name, p in named if p.grad is not None}


if __name__ == "__main__":
    ranks.main(gradients)
